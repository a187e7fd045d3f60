"""PyTorch Geometric: graphs of equally many nodes and edges, one a row, which the module puts into one graph."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.model import ROWS, Model, Ways, prepared

NODES, EDGES, FEATURES = 6, 14, 8
DENSE = ("DenseGCNConv", "DenseGATConv", "DenseSAGEConv", "DenseGraphConv", "DenseGINConv")
CONVOLUTIONS = (
    *("GCNConv", "GATConv", "GATv2Conv", "SAGEConv", "GraphConv", "TransformerConv", "TAGConv", "SGConv", "ChebConv"),
    *("ClusterGCNConv", "LEConv", "ResGatedGraphConv", "SuperGATConv", "ARMAConv", "GENConv", "MFConv"),
)
NETWORKS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")


class Graphs(nn.Module):
    """A network on graphs, as one on a batch of graphs: `(rows, nodes, features)` and `(rows, 2, edges)`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        rows = len(x)
        first = torch.arange(rows)[:, None, None] * NODES
        joined = (edges + first).transpose(0, 1).reshape(2, -1)
        nodes = self.network(x.flatten(0, 1), joined)
        return self.head(nodes.unflatten(0, (rows, NODES)).mean(1))


def names() -> list[str]:
    return [*NETWORKS, *CONVOLUTIONS, *DENSE]


def ways(name: str) -> Ways:
    gnn: Any = importlib.import_module("torch_geometric.nn")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, NODES, FEATURES, generator=generator, dtype=torch.float64)
    edges = torch.randint(NODES, (ROWS, 2, EDGES), generator=generator)
    made: Callable[..., Any] = getattr(gnn, name)
    if name in DENSE:
        adjacency = torch.zeros(ROWS, NODES, NODES, dtype=torch.float64)
        adjacency[torch.arange(ROWS)[:, None], edges[:, 0], edges[:, 1]] = 1
        arguments = [nn.Linear(FEATURES, FEATURES)] if name == "DenseGINConv" else [FEATURES, FEATURES]
        yield lambda: Model(prepared(made(*arguments)), {"x": x, "adj": adjacency})
    elif name in NETWORKS:
        yield lambda: Model(prepared(Graphs(made(FEATURES, FEATURES, 2, FEATURES))), {"x": x, "edges": edges})
    else:
        more = {"ChebConv": {"K": 2}}.get(name, {})
        yield lambda: Model(prepared(Graphs(made(FEATURES, FEATURES, **more))), {"x": x, "edges": edges})
