// A child process that ends as its first argument says.
import { KvError } from "@kv/interface";
import { receiveRequest, runTask, sendToOwner } from "@kv/program";

const forever = () => new Promise<never>(() => setInterval(() => {}, 1000));
const crash = (signal: NodeJS.Signals) => {
  process.stderr.write("\u001b[31mlast words\u001b[0m\n");
  process.kill(process.pid, signal);
  return forever();
};

const ENDS: Readonly<Record<string, () => unknown>> = {
  result: () => ({ of: "the task" }),
  nothing: () => undefined,
  request: () => receiveRequest(),
  error() {
    throw new KvError("KV_MEMORY_INVALID", "no memory", { hint: "add some" });
  },
  "error-of-node": () => {
    throw new TypeError("not a KvError");
  },
  "exit-1": () => {
    process.stderr.write("gives up\n");
    process.exit(1);
  },
  "exit-0": () => process.exit(0),
  SIGKILL: () => crash("SIGKILL"),
  SIGSEGV: () => crash("SIGSEGV"),
  hang: forever,
  // As a library that does not return: no callback of Node runs any more.
  "hang-in-a-call": () => {
    sendToOwner({ value: "busy" });
    for (;;);
  },
  async "hang-in-a-step"() {
    await sendToOwner({ step: "the first step" });
    await sendToOwner({ step: "the second step" });
    return forever();
  },
  async "result-and-crash"() {
    await sendToOwner({ value: "a result" });
    return crash("SIGSEGV");
  },
  async "result-and-exit-3"() {
    await sendToOwner({ value: "a result" });
    process.exit(3);
  },
  async "result-and-hang"() {
    await sendToOwner({ value: "a result" });
    return forever();
  },
  async floods() {
    for (let at = 0; at < 50; at += 1)
      await new Promise((done) => process.stdout.write(`${String(at).repeat(100_000)}\n`, done));
    return "flooded";
  },
  async serves() {
    process.on("message", (message) => void sendToOwner({ value: message }));
    await sendToOwner({ value: "ready" });
    return forever();
  },
};

await runTask(() => ENDS[process.argv[2] ?? ""]?.());
