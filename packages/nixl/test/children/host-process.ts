// Creates an agent, and reports what that has changed in the process. Starts a child before and after.
import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { nixlTransport } from "@kv/nixl";

const backend = process.argv[2] ?? "UCX";
const inherited = async (): Promise<string[]> => {
  const child: ChildProcess = spawn("sleep", ["60"], { stdio: "ignore" });
  // Until the child is another program: descriptors close then.
  while (readlinkSync(`/proc/${child.pid}/exe`) === process.execPath)
    await new Promise((done) => setTimeout(done, 2));
  const folder = `/proc/${child.pid}/fd`;
  // A program that starts opens its libraries for a moment: only what stays was inherited.
  for (let [now, last] = ["", "?"]; now !== last; [now, last] = [readdirSync(folder).join(), now])
    await new Promise((done) => setTimeout(done, 20));
  const names = readdirSync(folder).map((fd) => readlinkSync(`${folder}/${fd}`));
  child.kill("SIGKILL");
  return names;
};
const state = () => ({
  signals: /SigCgt:\s*(\w+)/.exec(readFileSync("/proc/self/status", "utf8"))?.[1],
  ignored: /SigIgn:\s*(\w+)/.exec(readFileSync("/proc/self/status", "utf8"))?.[1],
  umask: process.umask(),
  cwd: process.cwd(),
  coreLimit: /Max core.*/.exec(readFileSync("/proc/self/limits", "utf8"))?.[0],
  number: (1.5).toLocaleString("en"),
});

let hangups = 0;
process.on("SIGHUP", () => {
  hangups += 1;
});
const environment = { ...process.env };
const [before, inheritedBefore] = [state(), await inherited()];
const transport = nixlTransport({ backends: [backend] });
const agent = await transport.createAgent();
const [after, inheritedAfter] = [state(), await inherited()];
process.kill(process.pid, "SIGHUP");
await new Promise((done) => setTimeout(done, 50));
// V8 handles SIGSEGV of WebAssembly: a load beyond the end of memory is an error of JavaScript.
const module = "AGFzbQEAAAABBgFgAX8BfwMCAQAFAwEAAQcFAQFmAAAKCQEHACAAKAIACw==";
const { WebAssembly: wasm } = globalThis as unknown as {
  WebAssembly: {
    instantiate(bytes: Uint8Array): Promise<{ instance: { exports: { f(address: number): number } } }>;
  };
};
const { instance } = await wasm.instantiate(Buffer.from(module, "base64"));
let trapped = "";
try {
  instance.exports.f(0x7ffffff0);
} catch (error) {
  trapped = (error as Error).name;
}
await agent.close();
const variables = Object.keys(process.env).filter((name) => process.env[name] !== environment[name]);
await transport.close();
const report = { before, after, inheritedBefore, inheritedAfter, hangups, trapped, variables };
process.stdout.write(JSON.stringify(report));
