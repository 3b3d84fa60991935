import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { nixlTransport } from "@kv/nixl";
import { freePorts } from "@kv/testing/free-ports";
import { askNamespace, type BlockStore, MESSAGE_FIELDS, openTier, type Tier } from "@kv/tier";
import { afterAll, afterEach, beforeAll, beforeEach, expect, it, test, vi } from "vitest";
import { killPools } from "../../packages/pool/test/kills.js";
import { PEER_DIR } from "./server.js";

// The P2P tier of vLLM 0.33: its own session, ZMQ and NIXL files, unmodified, without an engine.

const BLOCK_BYTES = 65_536;
const BLOCKS = 64;

interface PeerEvent {
  readonly event: string;
  readonly [field: string]: unknown;
}

/** A process with vLLM's session. */
class VllmPeer {
  readonly events: PeerEvent[] = [];
  readonly peerId: string;
  readonly #process: ChildProcess;
  readonly ended: Promise<void>;

  constructor(port: number) {
    this.peerId = `127.0.0.1:${port}`;
    const script = fileURLToPath(new URL("p2p_peer.py", import.meta.url));
    const args = [script, this.peerId, String(BLOCKS), String(BLOCK_BYTES), "vllm"];
    this.#process = spawn(`${PEER_DIR}/vv/bin/python`, args, {
      env: { ...process.env, PYTHONPATH: `${PEER_DIR}/vllm33`, VLLM_TARGET_DEVICE: "cpu" },
      stdio: ["pipe", "pipe", "inherit"],
    });
    createInterface({ input: this.#process.stdout as NodeJS.ReadableStream }).on("line", (line) => {
      if (line.startsWith("{")) this.events.push(JSON.parse(line) as PeerEvent);
    });
    this.ended = new Promise((resolve) => {
      this.#process.on("exit", () => resolve());
    });
  }

  tell(command: object): void {
    this.#process.stdin?.write(`${JSON.stringify(command)}\n`);
  }

  /** The first event that fits, now or later. */
  async event(wanted: object, timeoutMs = 30_000): Promise<PeerEvent> {
    return vi.waitFor(
      () => {
        const found = this.events.find((event) =>
          Object.entries(wanted).every(([field, value]) => event[field] === value),
        );
        expect(found, JSON.stringify(wanted)).toBeDefined();
        return found as PeerEvent;
      },
      { timeout: timeoutMs, interval: 5 },
    );
  }

  end(signal: NodeJS.Signals): Promise<void> {
    this.#process.kill(signal);
    return this.ended;
  }
}

/** Blocks by name, in the slots of the memory. */
class NamedBlocks implements BlockStore {
  readonly slots = new Map<string, number>();
  pinned = 0;

  async pin(keys: readonly Uint8Array[]): Promise<(number | undefined)[]> {
    const found = keys.map((key) => this.slots.get(Buffer.from(key).toString()));
    this.pinned += found.filter((slot) => slot !== undefined).length;
    return found;
  }

  unpin(slots: readonly number[]): void {
    this.pinned -= slots.length;
  }
}

const transport = nixlTransport();
const memory = transport.allocate(BLOCKS * BLOCK_BYTES);
const store = new NamedBlocks();
let vllm: VllmPeer;
let tier: Tier;
let fingerprint = "";
let requests = 0;

async function startPeer(): Promise<VllmPeer> {
  const [port = 0] = await freePorts(1);
  const peer = new VllmPeer(port);
  await peer.event({ event: "ready" }, 120_000);
  return peer;
}

async function openOurs(given: object = {}): Promise<Tier> {
  return openTier({
    transport,
    host: "127.0.0.1",
    port: 0,
    memory,
    store,
    blockLengthBytes: BLOCK_BYTES,
    fingerprint,
    hashSeed: "vllm",
    landingBlocks: 4,
    ...given,
  });
}

async function readFills(names: readonly string[], from = tier, of = vllm.peerId) {
  const fills: number[][] = [];
  const keys = names.map((name) => Buffer.from(name));
  await from.read(of, keys, (_, bytes) => fills.push([...new Set(bytes)]));
  return fills;
}

beforeAll(async () => {
  vllm = await startPeer();
  fingerprint = String((await vllm.event({ event: "ready" }))["fingerprint"]);
  for (let block = 0; block < BLOCKS; block += 1)
    memory.bytes.fill(100 + block, block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
  tier = await openOurs();
}, 180_000);

afterAll(async () => {
  await vllm.end("SIGTERM");
  await tier.close();
  memory.close();
  await transport.close();
});

beforeEach(() => {
  vllm.events.length = 0;
  store.slots.clear();
  requests += 1;
});

/** Nobody holds a block at the end of a test. */
afterEach(() => vi.waitFor(() => expect(store.pinned).toBe(0)));

it("asks a vLLM which blocks it has, and gives it no metadata", async () => {
  expect(await askNamespace({ peerId: vllm.peerId, host: "127.0.0.1" })).toEqual({
    blockLengthBytes: BLOCK_BYTES,
    fingerprint,
    hashSeed: "vllm",
  });
  await vllm.event({ event: "ended" });
  await expect(
    askNamespace({ peerId: "127.0.0.1:1", host: "127.0.0.1", timeoutMs: 2000 }),
  ).rejects.toMatchObject({ code: "KV_PEER_DISCONNECTED" });
});

it("reads blocks of a vLLM, in rounds, up to the first that it lacks", async () => {
  vllm.tell({ hold: { keya0: 3, keya1: 1, keya2: 4, keya3: 9, keya4: 60, keya6: 7 } });
  await new Promise((resolve) => setTimeout(resolve, 50));
  const names = ["keya0", "keya1", "keya2", "keya3", "keya4", "keya5", "keya6"];
  expect(await readFills(names)).toEqual([[4], [2], [5], [10], [61]]);
  expect(await readFills(["keya5"])).toEqual([]);
});

it("serves a vLLM that looks up first, and gives its blocks back", async () => {
  store.slots.set("ours-a", 3).set("ours-b", 7);
  const request = `r${requests}`;
  vllm.tell({
    read: tier.localId,
    request,
    keys: ["ours-a", "theirs", "ours-b"],
    blocks: [40, 41, 42],
  });
  expect(await vllm.event({ event: "load", request })).toMatchObject({
    success: true,
    bytes: [[103], [107]],
  });
  vllm.tell({ finish: request, peer: tier.localId });
});

it("serves a vLLM that fetches without a look-up, as a decode worker's does", async () => {
  store.slots.set("ours-b", 7);
  const request = `r${requests}`;
  vllm.tell({ load: tier.localId, request, keys: ["ours-b"], blocks: [50] });
  expect(await vllm.event({ event: "load", request })).toMatchObject({
    success: true,
    bytes: [[107]],
  });
  const missing = `r${requests}-missing`;
  vllm.tell({ load: tier.localId, request: missing, keys: ["nobodys"], blocks: [51] });
  expect(await vllm.event({ event: "load", request: missing })).toMatchObject({ success: false });
});

it("gives found blocks back when the vLLM finishes without a fetch", async () => {
  store.slots.set("ours-a", 3);
  const request = `r${requests}`;
  vllm.tell({ read: tier.localId, request, keys: ["ours-a"], blocks: [] });
  await vllm.event({ event: "found", request });
  vllm.tell({ finish: request, peer: tier.localId });
});

test.each([
  ["fingerprint", { fingerprint: "0000000000000000" }],
  ["seed", { hashSeed: "another" }],
  ["length of blocks", { blockLengthBytes: BLOCK_BYTES / 2 }],
])("refuses a vLLM with another %s, and names both", async (_, given) => {
  const other = await openOurs(given);
  await expect(readFills(["keya0"], other)).rejects.toMatchObject({
    code: "KV_HANDSHAKE_INCOMPATIBLE",
  });
  await other.close();
});

it("reads again after it has closed and opened again", async () => {
  vllm.tell({ hold: { again: 5 } });
  const other = await openOurs();
  expect(await readFills(["again"], other)).toEqual([[6]]);
  await other.close();
  await vllm.event({ event: "ended", peer: other.localId });
  const { port } = new URL(`tcp://${other.localId}`);
  const next = await openOurs({ port: Number(port) });
  expect(await readFills(["again"], next)).toEqual([[6]]);
  await next.close();
});

it("serves 64 peers at a time, of which two are vLLM's, and holds nothing for them afterwards", async () => {
  const second = await startPeer();
  const small = transport.allocate(BLOCK_BYTES);
  const ours: Tier[] = [];
  while (ours.length < 62) ours.push(await openOurs({ memory: small, landingBlocks: 1 }));
  store.slots.set("ours-a", 3).set("ours-b", 7);
  const keys = ["ours-a", "ours-b"];
  const request = `r${requests}`;
  const theirs = [vllm, second];
  for (const one of theirs) one.tell({ read: tier.localId, request, keys, blocks: [30, 31] });
  // A look-up that waits while the others of this process connect is a miss for vLLM.
  for (const one of theirs)
    expect(await one.event({ event: "found", request })).toMatchObject({ keys });

  const reads = ours.map((one) => readFills(keys, one, tier.localId));
  expect(await Promise.all(reads)).toEqual(ours.map(() => [[103], [107]]));
  for (const one of theirs)
    expect(await one.event({ event: "load", request })).toMatchObject({
      success: true,
      bytes: [[103], [107]],
    });
  expect(tier.peers).toHaveLength(64);

  for (const one of theirs) one.tell({ finish: request, peer: tier.localId });
  await Promise.all([second.end("SIGKILL"), ...ours.map((one) => one.close())]);
  await vi.waitFor(() => expect(tier.peers).toEqual([vllm.peerId]), { timeout: 10_000 });
  small.close();
}, 300_000);

test.each(["SIGTERM", "SIGKILL"] as const)(
  "a vLLM that ends by %s in the middle of a read: the read is rejected, and nothing is held",
  async (signal) => {
    const ending = await startPeer();
    ending.tell({ hold: { "gone-0": 5 } });
    await new Promise((resolve) => setTimeout(resolve, 100));
    const take = vi.fn();
    expect(await tier.read(ending.peerId, [Buffer.from("gone-0")], take)).toBe(1);
    const read = tier.read(
      ending.peerId,
      Array.from({ length: 4000 }, () => Buffer.from("gone-0")),
      take,
    );
    const rejected = expect(read).rejects.toMatchObject({ code: "KV_PEER_DISCONNECTED" });
    await ending.end(signal);
    await rejected;
    await vi.waitFor(() => expect(tier.peers).not.toContain(ending.peerId));
  },
  180_000,
);

it("has the messages and fields of the wheel's protocol.py, and no others", () => {
  const path = `${PEER_DIR}/vllm33/vllm/v1/kv_offload/tiering/p2p/session/protocol.py`;
  const classes = readFileSync(path, "utf8")
    .split(/^class \w+Msg:$/m)
    .slice(1);
  const theirs = classes.map((text) => {
    const constants = [...text.matchAll(/^ {4}([A-Z_]+) = "(\w+)"$/gm)];
    const type = constants.find(([, name]) => name === "TYPE")?.[2];
    const fields = constants.filter(([, name]) => name !== "TYPE").map(([, , value]) => value);
    return [type, fields];
  });
  const greeting = ["block_len", "config_fingerprint", "hash_seed"];
  const ours = Object.entries(MESSAGE_FIELDS).map(([type, fields]) => [
    type,
    type === "lookup_resp" ? fields.filter((field) => !greeting.includes(field)) : fields,
  ]);
  const sorted = (list: unknown[][]) =>
    list.map(([type, fields]) => [type, [...(fields as string[])].sort()]).sort();
  expect(sorted(ours)).toEqual(sorted(theirs));
});

it("a pool that keeps its blocks in an S3 server has them after twenty kills, and none is torn", async () => {
  const [port = 0] = await freePorts(1);
  const server = spawn(`${PEER_DIR}/s3/bin/moto_server`, ["-p", String(port)], { stdio: "ignore" });
  const url = `http://127.0.0.1:${port}`;
  vi.stubEnv("AWS_ACCESS_KEY_ID", "any").stubEnv("AWS_SECRET_ACCESS_KEY", "any");
  vi.stubEnv("AWS_REGION", "us-east-1");
  try {
    await vi.waitFor(() => fetch(`${url}/kv-pool`, { method: "PUT" }), { timeout: 60_000 });
    await killPools(20, url);
  } finally {
    vi.unstubAllEnvs();
    server.kill();
  }
});
