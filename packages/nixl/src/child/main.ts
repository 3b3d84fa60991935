// The entry of every process that @kv/nixl starts: `node child.js TASK ARGUMENT…`, with an IPC channel for the answer.
import { KvError } from "@kv/interface";
import { benchTarget } from "../bench/target.js";
import { backendProbe, pairProbe, runtimeProbe } from "../doctor/probes.js";
import { checkMetadataTask } from "../metadata/checker-task.js";

const TASKS: Readonly<Record<string, (args: readonly string[]) => Promise<unknown>>> = {
  "bench-target": benchTarget,
  "check-metadata": checkMetadataTask,
  "probe-runtime": runtimeProbe,
  "probe-backend": backendProbe,
  "probe-pair": pairProbe,
};

const [name = "", ...args] = process.argv.slice(2);
// The process that started this one has ended.
process.once("disconnect", () => process.exit(0));
try {
  const task = TASKS[name];
  if (task === undefined) throw new KvError("KV_INTERNAL", `no task ${JSON.stringify(name)}`);
  const value = await task(args);
  await answer({ value });
} catch (error) {
  const { code, message, hint } = KvError.from(error, "KV_INTERNAL", `the task ${name} failed`);
  await answer({ error: { code, message, ...(hint === undefined ? {} : { hint }) } });
}
process.removeAllListeners("disconnect");
process.disconnect?.();

function answer(message: object): Promise<void> {
  return new Promise((resolve) => {
    if (process.send === undefined) resolve();
    else process.send(message, undefined, undefined, () => resolve());
  });
}
