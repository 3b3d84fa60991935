// The entry of all child processes: `node child.js TASK ARGUMENT…`, with an IPC channel for the
// answer.
import { KvError } from "@kv/interface";
import { answerOf, runTask, sendToOwner } from "@kv/program";
import { benchTarget } from "../bench/target.js";
import { backendProbe, pairProbe, runtimeProbe } from "../doctor/probes.js";
import type { CheckRequest } from "../metadata/checker.js";
import { nixlTransport } from "../transport.js";

const TASKS: Readonly<Record<string, (args: readonly string[]) => Promise<unknown>>> = {
  "bench-target": benchTarget,
  "check-metadata": checkMetadataTask,
  "probe-runtime": runtimeProbe,
  "probe-backend": backendProbe,
  "probe-pair": pairProbe,
};

const [name = "", ...args] = process.argv.slice(2);
await runTask(() => {
  const task = TASKS[name];
  if (task === undefined) throw new KvError("KV_INTERNAL", `no task ${JSON.stringify(name)}`);
  return task(args);
});

/** Loads the metadata that it is sent, one after the other. Damaged metadata may crash it. */
async function checkMetadataTask([backends = ""]: readonly string[]): Promise<never> {
  const transport = nixlTransport({ backends: backends.split(",") });
  const agent = await transport.createAgent();
  const load = async (metadata: string) =>
    agent.removeRemote(await agent.addRemote(Buffer.from(metadata, "base64")));
  let last = Promise.resolve();
  process.on("message", ({ metadata }: CheckRequest) => {
    last = last.then(async () => sendToOwner(await answerOf(() => load(metadata))));
  });
  await sendToOwner({ value: "ready" });
  return new Promise(() => {});
}
