// Runs cells of one route, one after another, and writes a line of JSON for each:
// `{ cell, problems }`. In a process of its own, whose threads and descriptors it can count.
import { type ChildProcess, spawn } from "node:child_process";
import { readdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { type NixlTransport, nixlTransport } from "@kv/nixl";
import { codeOf } from "../support/code-of.js";
import { listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";
import { threadNames } from "../support/thread-names.js";
import { Cable } from "./cable.js";
import { type Cell, isByPeer, nameOf, settingsOf } from "./cells.js";
import type { PeerReport, PeerTask } from "./dying-peer.js";

interface Options {
  /** All of one route, and either all or none with a cable that is cut. */
  readonly cells: readonly Cell[];
  readonly peerFile: string;
}
const { cells, peerFile } = JSON.parse(process.argv[2] ?? "{}") as Options;

const LENGTH = 32 << 20;
const BLOCK = 16_384;
const COUNT = LENGTH / BLOCK;
/** A transfer fails within its own deadline, and this much for a busy machine. */
const TRANSFER_MS = 1500;
const LATE_MS = 2000;
/** How long a peer may take to do something with the agent. */
const BEGIN_MS = 15_000;
/** Over LIBFABRIC a notification to a peer that does not answer takes 2 s. */
const NOTIFY_MS = 2500;
const CLOSE_MS = 300;
/**
 * libfabric closes none of the connections that peers, which are alive, have made to an agent that
 * closes: the healthy peer's and those of the other.
 */
const CONNECTIONS_TO_AGENT = 4;
/**
 * Growth of the process over all cells that is no leak: caches of allocators. An agent that is not
 * released has 100 MiB.
 */
const MEMORY_BYTES = 192 << 20;

const descriptors = () => readdirSync("/proc/self/fd").length;
const threads = () => threadNames().filter((name) => name.startsWith("kv_nixl"));

interface Peer extends PeerReport {
  readonly process: ChildProcess;
  readonly cable: Cable | undefined;
}
/** Where a peer runs: in a worker thread, behind a cable, or here with one network device. */
interface PeerPlace {
  readonly inWorker?: boolean;
  readonly cable?: Cable | undefined;
  readonly device?: string | undefined;
}

function startPeer(
  route: Cell["route"],
  { inWorker = false, cable, device }: PeerPlace = {},
): Promise<Peer> {
  const settings = settingsOf(route, cable === undefined ? device : cable.peerDevice);
  const options = { ...settings, lengthBytes: LENGTH, inWorker };
  const [command = "", ...args] = [
    ...(cable?.prefix ?? []),
    process.execPath,
    peerFile,
    JSON.stringify(options),
  ];
  const child = spawn(command, args, { stdio: ["ignore", "ignore", "pipe", "ipc"] });
  let errors = "";
  child.stderr?.on("data", (chunk: Buffer) => {
    errors = (errors + chunk.toString()).slice(-1000);
  });
  return new Promise((resolve, reject) => {
    child.once("message", (report) =>
      resolve({ ...(report as PeerReport), process: child, cable }),
    );
    child.once("exit", (code, signal) => {
      if (!child.killed) process.stderr.write(`a peer ended with ${signal ?? code}: ${errors}\n`);
      reject(new Error(`a peer ended with ${signal ?? code}: ${errors}`));
    });
  });
}

/** Ends the peer. Resolves when that is done, or after a second. */
async function end({ process: child, cable }: Peer, how: Cell["ending"]): Promise<void> {
  if (how === "cable") return cable?.cut();
  const ended = new Promise((resolve) => child.once("exit", resolve).once("message", resolve));
  if (how === "kill" || how === "term" || how === "stop")
    child.kill(`SIG${how.toUpperCase()}` as NodeJS.Signals);
  else child.send(how);
  await Promise.race([ended, sleep(how === "stop" ? 50 : 1000)]);
}

/**
 * Tells a peer what to do with the agent. Resolves with its first word of it: "begun", "right",
 * "wrong", or an error.
 */
function tell({ process: child }: Peer, task: PeerTask): Promise<string> {
  const said = new Promise<string>((resolve) =>
    child.once("message", (word) => resolve(String(word))),
  );
  child.send(task);
  return Promise.race([said, sleep(BEGIN_MS, "no answer")]);
}

async function run(
  cell: Cell,
  transport: NixlTransport,
  healthy: Peer,
  bad: Peer,
): Promise<string[]> {
  const problems: string[] = [];
  /** The outcome of a call, which must come in its time. */
  const outcome = async (
    what: string,
    call: Promise<unknown>,
    limitMs = TRANSFER_MS + NOTIFY_MS,
  ) => {
    const begun = performance.now();
    const late = sleep(limitMs + LATE_MS + 2000, "no answer");
    const result = await Promise.race([codeOf(call), late]);
    const tookMs = performance.now() - begun;
    if (tookMs > limitMs + LATE_MS)
      problems.push(`${what} took ${Math.round(tookMs)} ms: ${result}`);
    return result;
  };
  const agent = await transport.createAgent();
  const memory = transport.allocate(LENGTH);
  memory.bytes.fill(7);
  await agent.register(memory);
  const metadata = Buffer.from(await agent.localMetadata()).toString("base64");
  const own: PeerReport = { name: agent.name, address: memory.address, metadata };
  const all = scattered(COUNT, 7);
  const lists = new Map<Peer, Awaited<ReturnType<typeof listsOf>>>();
  const connect = async (peer: Peer) => {
    await agent.addRemote(Buffer.from(peer.metadata, "base64"));
    return listsOf(agent, memory, peer.name, peer, BLOCK, COUNT);
  };
  const move = async (operation: "READ" | "WRITE", peer: Peer, ids: Int32Array) => {
    const known = lists.get(peer) ?? (await connect(peer));
    lists.set(peer, known);
    await known.move(operation, ids, { timeoutMs: TRANSFER_MS }).done;
  };
  await move("READ", healthy, all.subarray(0, 8));
  if (!isByPeer(cell) && cell.phase !== "handshake") await move("READ", bad, all.subarray(0, 8));

  const byPeer = async () => {
    const said = await tell(bad, { phase: cell.phase as PeerTask["phase"], of: own });
    if (said !== "begun") problems.push(`the peer that was to act: ${said}`);
  };
  const actions: Partial<Record<Cell["phase"], () => Promise<unknown>>> = {
    read: () => move("READ", bad, all),
    write: () => move("WRITE", bad, all),
    notify: async () => {
      for (let count = 0; count < 100; count++) {
        await agent.notify(bad.name, new Uint8Array(1024));
        await sleep(1);
      }
    },
    handshake: () => move("READ", bad, all.subarray(0, 8)),
  };
  if (isByPeer(cell)) await byPeer();
  const act = actions[cell.phase] ?? (() => Promise.resolve());
  const acting = outcome(cell.phase, act());
  await sleep(Math.random() * 4);
  await end(bad, cell.ending);
  const few = all.subarray(0, 64);
  const during = outcome("READ of a healthy peer meanwhile", move("READ", healthy, few));
  await acting;
  const healthyDuring = await during;
  if (healthyDuring !== "done" && cell.route !== "libfabric-tcp")
    problems.push(`healthy peer meanwhile: ${healthyDuring}`);
  if (isByPeer(cell)) {
    const said = await tell(healthy, { phase: "check", of: own });
    if (said !== "right") problems.push(`a healthy peer's READ of the agent: ${said}`);
  } else {
    const after = await outcome("READ afterwards", move("READ", bad, few));
    // CMA copies from a process that is stopped, and from one whose agent has closed but whose
    // memory is there.
    if (after === "done" && cell.route !== "ucx-cma")
      problems.push("a READ of the peer that has ended was done");
    await outcome("notify afterwards", agent.notify(bad.name, new Uint8Array(8)), NOTIFY_MS);
  }
  memory.bytes.fill(0, 0, 64 * BLOCK);
  const good = await outcome(
    "READ of a healthy peer",
    move("READ", healthy, scattered(4)),
    TRANSFER_MS,
  );
  if (good !== "done") problems.push(`healthy peer afterwards: ${good}`);
  else if (memory.bytes.subarray(0, 4 * BLOCK).some((byte) => byte !== 7))
    problems.push("wrong bytes of a healthy peer");
  await outcome("close", agent.close({ timeoutMs: CLOSE_MS }), CLOSE_MS);
  memory.close();
  return problems;
}

async function runRoute(
  route: Cell["route"],
  own: readonly Cell[],
  cable: Cable | undefined,
): Promise<void> {
  const device = cable?.device;
  const transport = nixlTransport(settingsOf(route, device));
  const peerOf = (cell: Cell | undefined) =>
    cell && startPeer(route, { inWorker: cell.ending === "terminate", cable });
  let next: Promise<Peer> | undefined = peerOf(own[0]);
  const healthy = await startPeer(route, { device });
  // What stays for as long as the process: the library itself.
  await (await transport.createAgent()).close();
  let firstBytes = 0;
  for (const [index, cell] of own.entries()) {
    const bad = await next;
    if (bad === undefined) break;
    // Behind a cable, which is cut, no peer can start meanwhile.
    next = cable === undefined ? peerOf(own[index + 1]) : undefined;
    const before = descriptors();
    const problems = await run(cell, transport, healthy, bad).catch((error: unknown) => [
      `failed: ${error}`,
    ]);
    bad.process.kill("SIGKILL");
    for (let waitedMs = 0; threads().length > 0 && waitedMs < 4000; waitedMs += 20) await sleep(20);
    if (threads().length > 0) problems.push(`${threads().length} threads of agents are left`);
    // The next peer is being started: its channel is one descriptor, before and after.
    await next;
    const more = descriptors() - before;
    const usual = 1 + (isByPeer(cell) && route === "libfabric-tcp" ? CONNECTIONS_TO_AGENT : 0);
    if (more > usual) problems.push(`${more} descriptors are left`);
    if (index === 1) firstBytes = process.memoryUsage.rss();
    const grown = process.memoryUsage.rss() - firstBytes;
    if (index > 1 && grown > MEMORY_BYTES) problems.push(`${grown >> 20} MiB are left`);
    process.stdout.write(`${JSON.stringify({ cell: nameOf(cell), problems })}\n`);
    cable?.mend();
    if (cable !== undefined) next = peerOf(own[index + 1]);
  }
  healthy.process.kill("SIGKILL");
  await transport.close();
}

const [first] = cells;
if (first !== undefined) {
  const cable = first.ending === "cable" ? new Cable(process.pid % 249) : undefined;
  await runRoute(first.route, cells, cable).finally(() => cable?.remove());
}
process.exit(0);
