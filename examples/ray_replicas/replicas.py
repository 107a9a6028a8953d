"""Data-parallel replicas behind Ray: each generates for its share of the prompts, on one GPU or on several ranks.

python replicas.py ../k31_tiny --replicas 2 --target cpu:reference --prompt-ids 1,2,3 --prompt-ids 7
"""

import argparse
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kimigraph import CompileConfig, Generator, Sampling

ray: Any = import_module("ray")
placement: Any = import_module("ray.util.placement_group")
strategies: Any = import_module("ray.util.scheduling_strategies")


class Rank:
    """One rank of one replica, in a process of its own."""

    def __init__(self, source: str, config: CompileConfig) -> None:
        self._generator = Generator(source, config=config)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The new tokens of each prompt; every rank of a replica is asked for the same, and gives the same."""
        return [list(made.tokens) for made in self._generator.generate(prompts, sampling)]


class Replica:
    """The ranks of one replica (``tp``, ``pp`` and ``sp`` of the configuration), on one machine."""

    def __init__(self, source: str, config: CompileConfig) -> None:
        ways = config.mesh.size
        needs: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0 if config.target.startswith("cpu") else 1}
        bundle = {"CPU": 1, "GPU": 1} if needs["num_gpus"] else {"CPU": 1}
        group = placement.placement_group([bundle] * ways, strategy="STRICT_PACK")
        together = strategies.PlacementGroupSchedulingStrategy(group)
        port = ray.get(ray.remote(free_port).options(num_cpus=0, scheduling_strategy=together).remote())
        self.ranks = [
            ray.remote(Rank)
            .options(**needs, scheduling_strategy=together, runtime_env={"env_vars": variables(rank, ways, port)})
            .remote(source, config)
            for rank in range(ways)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
        """What will be the new tokens of each prompt: ``ray.get`` waits for it, and raises the error of a rank."""
        return [rank.generate.remote(prompts, sampling) for rank in self.ranks]


def variables(rank: int, ways: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank: who the others are."""
    if ways == 1:
        return {}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ways, "MASTER_PORT": port}
    return {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in place.items()}}


def free_port() -> int:
    """A port that nobody listens on, on the machine of the replica."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def generate(replicas: Sequence[Replica], prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """The new tokens of all prompts, in their order; replica r takes every so many-th, from the r-th on."""
    count = len(replicas)
    asked = [replica.generate(prompts[number::count], sampling) for number, replica in enumerate(replicas)]
    made = [ray.get(each)[0] for each in asked]
    return [made[number % count][number // count] for number in range(len(prompts))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate from the command line; one line of token ids for each prompt."""
    parser = argparse.ArgumentParser(description="generate with data-parallel replicas behind Ray")
    parser.add_argument("source", help="directory of a model; on all machines, as is the compile cache")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="ranks of a replica that share out heads")
    parser.add_argument("--pp", type=int, default=1, help="stages of a replica that share out layers")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--context", type=int)
    parser.add_argument("--prompt-ids", action="append", required=True, metavar="1,2,3")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    config = CompileConfig(target=options.target, context=options.context, tp=options.tp, pp=options.pp)
    prompts = [[int(token) for token in text.split(",")] for text in options.prompt_ids]
    ray.init()
    replicas = [Replica(options.source, config) for _ in range(options.replicas)]
    for tokens in generate(replicas, prompts, Sampling(max_new_tokens=options.max_new_tokens)):
        print(*tokens)


if __name__ == "__main__":
    main()
