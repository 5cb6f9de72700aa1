"""What a data set asks of its tables: how often which rows are looked up, counted once and saved beside the data."""
