"""Processes of a run: started or joined (start), one rank's work (worker), whose error to show (failures)."""
