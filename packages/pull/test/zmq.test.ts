import { zmqSideChannel } from "@kv/connector";
import { memoryNetwork } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { createSimEngine } from "./sim-engine.js";
import { prompt } from "./stage.js";

it("over the real side channel, in real time: handshake, lease question, a rank that is not there", async () => {
  const network = memoryNetwork();
  const violations: string[] = [];
  const engine = (hostName: string, tpSize: number) =>
    createSimEngine({
      network,
      hostName,
      engineId: hostName,
      tpSize,
      blockSize: 16,
      numBlocks: 64,
      sideChannel: zmqSideChannel(),
      violation: (what) => void violations.push(what),
    });
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
  expect(violations).toEqual([]);
  await Promise.all([p, d, e].map((each) => each.close()));
  expect(Object.values(network.outstanding()).filter((held) => held !== 0)).toEqual([]);
});
