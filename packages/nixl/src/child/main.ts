// The entry of every process that @kv/nixl starts: `node child.js TASK ARGUMENT…`, with an IPC channel for the answer.
import { KvError } from "@kv/interface";
import { runTask } from "@kv/program";
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
await runTask(() => {
  const task = TASKS[name];
  if (task === undefined) throw new KvError("KV_INTERNAL", `no task ${JSON.stringify(name)}`);
  return task(args);
});
