"""Networks over an injected embedding bag collection.

Every model is built as `Model(bags, dense_features, sparse_features, embedding_dim, **hyper)`: `bags` maps a
KeyedJaggedTensor to a KeyedTensor with one [B, embedding_dim] block per name in `sparse_features`; calling
the model with dense [B, dense_features] and the KeyedJaggedTensor gives logits [B]. A class of the user's own
with the same constructor is named by `model._target_`.
"""

from hetrain.models.dcn import DCN
from hetrain.models.deepfm import DeepFM
from hetrain.models.dlrm import DLRM
from hetrain.models.wdl import WDL

__all__ = ["DCN", "DLRM", "WDL", "DeepFM"]
