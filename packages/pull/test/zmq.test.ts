import { prompt } from "@kv/testing/scenarios/scenario";
import { zmqEngines } from "@kv/testing/scenarios/zmq-engines";
import { expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

it("over ZMQ in real time: handshakes, lease queries, and refusals of a wrong engine and an unknown rank", async () => {
  const { engine, end } = zmqEngines(pullConnector);
  const p = await engine("p", 2);
  const d = await engine("d", 1);
  await Promise.all(
    Array.from({ length: 8 }, async (_, n) => {
      const params = await p.prefill(prompt(n));
      await d.decode({ ...prompt(n), params });
    }),
  );
  const params = await p.prefill(prompt(9));
  const wrong = { ...params, remote_engine_id: "p-of-four-ranks", tp_size: 4 };
  await expect(d.decode({ ...prompt(9), params: wrong })).rejects.toMatchObject({
    code: "KV_HANDSHAKE_WRONG_ENGINE",
  });
  const four = { ...params, tp_size: 4 };
  const e = await engine("e", 1);
  await expect(e.decode({ ...prompt(9), params: four })).rejects.toMatchObject({
    code: "KV_HANDSHAKE_REFUSED",
  });
  await d.decode({ ...prompt(9), params });
  await end();
});
