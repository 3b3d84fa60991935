// Creates an agent, and reports what that has changed in the process. Starts a child before and
// after.
import { type ChildProcess, spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { closeSync, openSync, readdirSync, readFileSync, readlinkSync, readSync } from "node:fs";
import { stat } from "node:fs/promises";
import { nixlTransport } from "@kv/nixl";
import { threadNames } from "../support/thread-names.js";

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
const ownFile = (name: string) => readFileSync(`/proc/self/${name}`, "utf8");
const mappings = () => ownFile("maps").split("\n");
const state = () => ({
  status: ownFile("status").match(
    /^(Sig(Ign|Cgt|Blk)|Umask|NoNewPrivs|Seccomp|Cap\w+|THP_enabled):.*$/gm,
  ),
  cwd: process.cwd(),
  limits: ownFile("limits"),
  coreDumps: ownFile("coredump_filter"),
  // Such as O_NONBLOCK, which the shell that started this process would see.
  streams: [0, 1, 2].map((fd) => /flags:\s*(\w+)/.exec(ownFile(`fdinfo/${fd}`))?.[1]),
  // setlocale() maps the files of the locale that LC_ALL names.
  locale: mappings().filter((line) => line.includes("/locale/")),
  // Functions that the libraries replace by others, such as mmap by UCX's memory hooks.
  code: codeOf(programs),
});

/**
 * The programs and libraries that are loaded: the address, the length and the file of their code.
 */
function loadedCode(): [address: number, length: number, file: string][] {
  return mappings().flatMap((line): [number, number, string][] => {
    const [, from = "", to = "", file = ""] = /^(\w+)-(\w+) r-xp .* (\/.*)$/.exec(line) ?? [];
    const address = Number.parseInt(from, 16);
    return file === "" ? [] : [[address, Number.parseInt(to, 16) - address, file]];
  });
}

/** A digest of the code of each of them, as it is in memory. */
function codeOf(programs: ReturnType<typeof loadedCode>): string[] {
  const memory = openSync("/proc/self/mem", "r");
  const digests = programs.map(([address, length, file]) => {
    const bytes = Buffer.alloc(length);
    readSync(memory, bytes, 0, length, address);
    return `${file} ${createHash("sha256").update(bytes).digest("hex")}`;
  });
  closeSync(memory);
  return digests;
}

/** How many threads have each name. */
function threads(): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const name of threadNames()) counts[name] = (counts[name] ?? 0) + 1;
  return counts;
}

// The threads of Node's pool begin with its first use.
await stat(".");
// Node sets O_NONBLOCK when it first uses them.
void [process.stdin, process.stdout, process.stderr];
const programs = loadedCode();
let hangups = 0;
process.on("SIGHUP", () => {
  hangups += 1;
});
const environment = { ...process.env };
const [before, inheritedBefore, threadsBefore] = [state(), await inherited(), threads()];
const transport = nixlTransport({ backends: [backend] });
const agent = await transport.createAgent();
const [after, inheritedAfter, threadsAfter] = [state(), await inherited(), threads()];
const second = await transport.createAgent();
const threadsOfTwo = threads();
await second.close();
process.kill(process.pid, "SIGHUP");
await new Promise((done) => setTimeout(done, 50));
// V8 handles SIGSEGV of WebAssembly: a load beyond the end of memory is an error of JavaScript.
const module = "AGFzbQEAAAABBgFgAX8BfwMCAQAFAwEAAQcFAQFmAAAKCQEHACAAKAIACw==";
const { WebAssembly: wasm } = globalThis as unknown as {
  WebAssembly: {
    instantiate(
      bytes: Uint8Array,
    ): Promise<{ instance: { exports: { f(address: number): number } } }>;
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
const variables = Object.keys(process.env).filter(
  (name) => process.env[name] !== environment[name],
);
await transport.close();
// The last thread ends after the call that ends it.
for (let tries = 0; tries < 100 && threads().kv_nixl !== undefined; tries += 1)
  await new Promise((done) => setTimeout(done, 20));
const report = {
  before,
  after,
  inheritedBefore,
  inheritedAfter,
  hangups,
  trapped,
  variables,
  threadsBefore,
  threadsAfter,
  threadsOfTwo,
  threadsClosed: threads(),
};
process.stdout.write(JSON.stringify(report));
