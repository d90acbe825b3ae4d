"""One SPU party, run by the interpreter of SPU_PYTHON (which has ``spu`` and ``jax``, and nothing of ours).

    worker.py JOB RANK

JOB is a directory with ``job.json`` (addresses as each rank sees them, repetitions, workloads) and ``inputs-<k>.npz``.
Rank 0 deals the shares through files, outside the time, and puts the results together in ``outputs-<k>.npy``; every
rank writes ``times-<rank>.json``. Link statistics are printed by SPU itself.
"""

import json
import pickle
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import spu.utils.frontend as frontend
from spu import libspu

FRACTION_BITS = 16


def step(method, rate, rows, one_hot, norms, inverse_square, weights):
    """One clipped step of SGD on a linear layer, without noise."""
    delta = softmax(rows @ weights) - one_hot
    if method == "factored":
        factors = jax.lax.rsqrt(jnp.maximum(1.0, jnp.sum(delta * delta, axis=1) * norms))
        gradient = rows.T @ (factors[:, None] * delta)
    else:
        g = rows[:, :, None] * delta[:, None, :]
        squares = jnp.sum(g * g, axis=(1, 2)) * inverse_square[0]
        factors = jax.lax.rsqrt(jnp.maximum(1.0, squares))
        gradient = jnp.sum(factors[:, None, None] * g, axis=0)
    return weights - rate * gradient


def softmax(logits):
    """Shifted by the row maximum; one reciprocal a row."""
    e = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return e * (1.0 / jnp.sum(e, axis=1, keepdims=True))


def function_of(program, arguments):
    """The jax function of a workload, or None if SPU has none."""
    functions = {
        "multiply": lambda x, y: x * y,
        "matmul": lambda x, y: x @ y,
        "comparison": lambda x: x < 0,
        "relu": lambda x: jnp.where(x < 0, 0.0, x),
        "division": lambda x, y: x / y,
        "reciprocal": lambda x: 1.0 / x,
        "inverse_sqrt": jax.lax.rsqrt,
        "clip_factor": lambda q: jax.lax.rsqrt(jnp.maximum(q, 1.0)),
        "exp": jnp.exp,
        "softmax": softmax,
    }
    if program == "step":
        method, rate = arguments[0], arguments[4]
        return lambda *inputs: step(method, rate, *inputs)
    return functions[program]


def compiled(function, inputs):
    names = [f"in{position}" for position in range(len(inputs))]
    secret = [libspu.Visibility.VIS_SECRET] * len(inputs)
    executable, _ = frontend.compile(
        frontend.Kind.JAX, function, inputs, {}, names, secret, lambda outs: [f"out{k}" for k in range(len(outs))]
    )
    return executable


def write(path, value):
    path.write_bytes(pickle.dumps(value))


def read(path):
    return pickle.loads(path.read_bytes())


def main():
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((directory / "job.json").read_text())
    config = libspu.RuntimeConfig(
        protocol=libspu.ProtocolKind.ABY3, field=libspu.FieldType.FM64, fxp_fraction_bits=FRACTION_BITS
    )
    config.enable_pphlo_profile = True  # prints what each run sent
    description = libspu.link.Desc()
    description.recv_timeout_ms = 600_000
    description.http_timeout_ms = 600_000
    for party, address in enumerate(job["addresses"][rank]):
        description.add_party(f"party{party}", address)
    link = libspu.link.create_brpc(description, rank)
    io = libspu.IoWrapper(3, config)
    runtime = libspu.RuntimeWrapper(link, config)
    found = []
    for k, workload in enumerate(job["workloads"]):
        with np.load(directory / f"inputs-{k}.npz") as stored:
            inputs = [stored[f"arr_{position}"].astype(np.float32) for position in range(len(stored.files))]
        executable = compiled(function_of(workload["program"], workload["arguments"]), inputs)
        if rank == 0:
            dealt = [io.MakeShares(values, libspu.Visibility.VIS_SECRET) for values in inputs]
            for party in range(3):
                write(directory / f"inputs-{k}-{party}.bin", [shares[party] for shares in dealt])
        link.barrier()
        for position, share in enumerate(read(directory / f"inputs-{k}-{rank}.bin")):
            runtime.SetVar(f"in{position}", share)
        times = []
        for _ in range(job["repeat"] + 1):  # the first is a warm-up
            link.barrier()
            print(f"begin {k}", flush=True)
            begun = time.perf_counter()
            runtime.Run(executable)
            times.append(time.perf_counter() - begun)
        write(directory / f"outputs-{k}-{rank}.bin", runtime.GetVar("out0"))
        link.barrier()
        if rank == 0:
            values = io.Reconstruct([read(directory / f"outputs-{k}-{party}.bin") for party in range(3)])
            np.save(directory / f"outputs-{k}.npy", np.asarray(values, dtype=np.float64))
        found.append(times[1:])
    (directory / f"times-{rank}.json").write_text(json.dumps(found))
    link.barrier()
    link.stop_link()


main()
