import refmpc


async def program(party, own):
    x = await refmpc.input_from_party(party, 0, own, shape=(3,))
    y = await refmpc.softmax(x)
    return await refmpc.reveal(y, release="probabilities")


if __name__ == "__main__":
    result = refmpc.run(program, [[1.0, 2.0, 3.0], None, None], releases={"probabilities": "an example, no claim"})
    print(result.outputs[0].round(3), result.rounds, result.bytes)
