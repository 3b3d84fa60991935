import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { zmqEngines } from "@kv/testing/scenarios/zmq-engines";
import { afterAll, it } from "vitest";
import { pushConnector } from "../src/index.js";

const folder = mkdtempSync(join(tmpdir(), "kv-curve-"));
afterAll(() => rmSync(folder, { recursive: true }));
const keyFile = join(folder, "key");
writeFileSync(keyFile, "the shared key of this test");

it.each([
  ["", {}],
  [" with handshake_key_file", { handshake_key_file: keyFile }],
])("push works over the ZMQ side channel%s in real time, in both orders", async (_name, extra) => {
  const { engine, end } = zmqEngines(pushConnector);
  const p = await engine("p", 2, extra);
  const d = await engine("d", 1, extra);
  const leg = (n: number, suffix: string) => ({
    prompt: n,
    numTokens: 40,
    requestId: `cmpl-r${n}-0-${suffix}`,
  });
  const params = await p.prefill(leg(0, "0000aaaa"));
  await d.decode({ ...leg(0, "bbbb0000"), params });
  // P's address, which a proxy learns from the first response.
  const { remote_block_ids: _, remote_num_tokens: __, kv_peer: ___, ...coordinates } = params;
  await Promise.all(
    Array.from({ length: 6 }, (_each, n) =>
      Promise.all([
        p.prefill(leg(n + 1, "0000aaaa")),
        d.decode({
          ...leg(n + 1, "bbbb0000"),
          params: { ...coordinates, remote_request_id: `r${n + 1}` },
        }),
      ]),
    ),
  );
  await end();
});
