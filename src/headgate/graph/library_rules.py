"""Layers of other libraries that are what their base class is, though they override its `forward`.

Only what the program has imported already is looked at: headgate imports none of these libraries itself. Knows the
names of a few classes, and nothing of models.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from headgate.graph.layer_rules import LAYER_RULES, LayerRule, PerChannel

# module, class, rule: a convolution with TensorFlow's padding; a BatchNorm that never changes
KNOWN: tuple[tuple[str, str, LayerRule], ...] = (
    ("timm.layers.conv2d_same", "Conv2dSame", LAYER_RULES[nn.Conv2d]),
    ("torchvision.ops.misc", "FrozenBatchNorm2d", PerChannel(attribute=None, keeps_shape=True)),
)


def adopt_library_rules() -> None:
    """Add the rules of known classes that are loaded; rules the user registered stay."""
    for module_name, class_name, rule in KNOWN:
        found: Any = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            LAYER_RULES.setdefault(found, rule)
