"""SPU's private set intersection of two files on this machine, for ``bench.alignment``: run by the interpreter of
``SPU_PYTHON``.

    python spu_alignment.py METHOD DIRECTORY COMMON

reads 0.csv and 1.csv there, a process each, and prints seconds, processor seconds and memory of both as JSON (of bytes
it knows nothing: 0). It takes nothing but SPU and the standard library, because that interpreter has nothing of ours.
"""

import json
import multiprocessing
import os
import resource
import socket
import sys
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [place for place in sys.path if os.path.abspath(place) != HERE]  # a neighbour here is called spu, too


def _ports(count: int) -> list[int]:
    with_port = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in with_port]
    for each in with_port:
        each.close()
    return found


def _party(rank: int, method: str, folder: str, ports: list[int], ready: Any, results: Any) -> None:
    import spu
    import spu.psi as psi

    description = spu.link.Desc()
    for number, port in enumerate(ports):
        description.add_party(f"party{number}", f"127.0.0.1:{port}")
    link = spu.link.create_brpc(description, rank)
    protocol = psi.PsiProtocolConfig(
        protocol=getattr(psi.PsiProtocol, f"PROTOCOL_{method}"),
        receiver_rank=0,
        broadcast_result=True,
        ecdh_params=psi.EcdhParams(curve=psi.EllipticCurveType.CURVE_25519),
    )
    config = psi.PsiExecuteConfig(
        protocol_conf=protocol,
        input_params=psi.InputParams(path=f"{folder}/{rank}.csv", selected_keys=["id"], keys_unique=True),
        output_params=psi.OutputParams(path=f"{folder}/{rank}-{method}.csv"),
    )
    ready.wait()
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    report = psi.psi_execute(config, link)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    results.put((report.intersection_count, seconds, busy, after.ru_maxrss * 1024))
    link.stop_link()


def main(method: str, folder: str, common: int) -> None:
    context = multiprocessing.get_context("spawn")
    ready, results, ports = context.Barrier(2), context.Queue(), _ports(2)
    arguments = (method, folder, ports, ready, results)
    parties = [context.Process(target=_party, args=(rank, *arguments)) for rank in range(2)]
    for party in parties:
        party.start()
    for party in parties:
        party.join()
        assert party.exitcode == 0, "a party failed: see its traceback above"
    found = [results.get(timeout=10) for _ in parties]
    counts, seconds, busy, memory = zip(*found)  # noqa: B905 - an interpreter of any version
    assert set(counts) == {common}, counts
    facts = {"seconds": max(seconds), "cpu_seconds": sum(busy), "bytes": 0, "largest_memory": max(memory)}
    print(json.dumps(facts), flush=True)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
