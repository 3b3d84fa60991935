// P and D in two processes; the KV moves over NIXL. A real D gets what P says through a proxy, this
// one through Node's IPC channel.
import { fork } from "node:child_process";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { readTransferConfig } from "@kv/connector";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { zmqSideChannel } from "@kv/side-channel";
import { startEngine } from "./engine.mjs";

const isP = process.argv[2] === "p";
const config = readTransferConfig(
  { kv_connector: "NixlConnector", kv_role: isP ? "kv_producer" : "kv_consumer" },
  { env: { VLLM_NIXL_SIDE_CHANNEL_HOST: "127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "0" } },
);
const engine = await startEngine({
  engineId: isP ? "p" : "d",
  connector: pullConnector,
  config,
  transport: nixlTransport(),
  sideChannel: zmqSideChannel(),
});
const tokens = Array.from({ length: 48 }, (_, position) => position);
const prompt = { requestId: "r", numPromptTokens: 48, promptTokenIds: tokens };
const digest = (blocks) => createHash("sha256").update(Buffer.concat(blocks)).digest("hex");

if (isP) {
  const kvTransferParams = engine.prefill(prompt, [5, 9, 2]);
  process.send?.({ kvTransferParams, sha256: digest(engine.blocks([5, 9, 2])) });
  await engine.sent("r");
  console.log("P may free its blocks");
  process.disconnect();
} else {
  const p = fork(import.meta.filename, ["p"]);
  const exited = once(p, "exit");
  const [{ kvTransferParams, sha256 }] = await once(p, "message");
  await engine.receive({ ...prompt, kvTransferParams }, [30, 1, 17]);
  await exited;
  console.log(
    "D's KV is",
    digest(engine.blocks([30, 1, 17])) === sha256 ? "equal to P's" : "NOT P's",
  );
}
await engine.close();
