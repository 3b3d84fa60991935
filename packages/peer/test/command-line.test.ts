import { expect, test } from "vitest";
import { runKvPeer } from "./run-kv-peer.js";

test.each([
  "doctor --prefill http://127.0.0.1:1 --bogus",
  "doctor --prefill http://127.0.0.1:1 --tp x",
  "doctor",
  "decode",
  "prefill --from . --port x",
  "unheard-of",
])("kv-peer %s exits with 2, unlike a failed check or an exceeded limit", async (line) => {
  const { code, stdout, stderr } = await runKvPeer(line);
  expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
  expect(stderr).toMatch(/^kv-peer: .+ \[KV_CONFIG_INVALID\]$/m);
});
