import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { zmqEngines } from "@kv/testing/scenarios/zmq-engines";
import { memorySideChannel } from "@kv/transport-memory";
import { afterAll, expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

const folder = mkdtempSync(join(tmpdir(), "kv-curve-"));
afterAll(() => rmSync(folder, { recursive: true }));
const withKey = (key: string) => {
  const file = join(folder, key.replaceAll(" ", "-"));
  writeFileSync(file, key);
  return { handshake_key_file: file };
};

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

it("with handshake_key_file: engines with the key hand over; of a pair with one key or two, both sides say why not", async () => {
  const { engine, end } = zmqEngines(pullConnector);
  const key = withKey("the shared key of this test");
  const p = await engine("p", 2, key);
  const d = await engine("d", 1, key);
  await Promise.all(
    Array.from({ length: 8 }, async (_, n) => {
      const params = await p.prefill(prompt(n));
      await d.decode({ ...prompt(n), params });
    }),
  );
  const plain = await engine("plain", 1);
  const other = await engine("other", 1, withKey("another key than that one"));
  for (const [n, [from, to]] of [
    [p, plain],
    [plain, d],
    [p, other],
    [other, d],
  ].entries()) {
    const params = await from?.prefill(prompt(20 + n));
    const error = await to?.decode({ ...prompt(20 + n), params: params ?? {} }).then(
      () => undefined,
      (thrown: unknown) => thrown,
    );
    expect(error, `pair ${n}`).toMatchObject({ code: "KV_HANDSHAKE_UNTRUSTED" });
  }
  await end();
});

it("handshake_key_file is refused where the side channel cannot encrypt", async () => {
  const play = createScenario();
  const { withEncryption: _, ...sideChannel } = memorySideChannel({
    network: play.network,
    host: "p",
  });
  const extra = withKey("the shared key of this test");
  await expect(play.engine("p", { extra, sideChannel })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("handshake_key_file"),
  });
});
