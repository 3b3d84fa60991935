import { writeFileSync } from "node:fs";
import { createServer, type Socket } from "node:net";
import { join } from "node:path";
import { KvError, systemClock, systemRandom } from "@kv/interface";
import {
  type AgentMetadata,
  compatibilityHash,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
} from "@kv/protocol";
import { readHandshakeKeys, zmqSideChannel } from "@kv/side-channel";
import { listening } from "@kv/testing/http/listening";
import { RECORDED_METADATA as METADATA, RECORDED_REPLY } from "@kv/testing/http/side-channel";
import { recordedLog } from "@kv/testing/recorded-log";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";
import { Router } from "zeromq";
import type { InstanceSpec, Role } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import { InstancePool } from "../routing/instance-pool.js";
import { roundRobin } from "../routing/routing.js";
import { Pairing } from "./pairing.js";
import type { PairingSettings } from "./pairing-settings.js";

const FACTORS = {
  attn_backend_name: "CPU_ATTN",
  cache_dtype: "auto",
  dtype: "torch.float32",
  head_size: 32,
  is_hma_enabled: true,
  model: "tiny",
  nixl_connector_version: 15,
  num_hidden_layers: 4,
  num_kv_heads: 4,
  speculative_config: null,
  transfer_mode: "pull",
  vllm_version: "0.33.0",
};
const V32 = { vllm_version: "0.32.0", nixl_connector_version: 14 };

interface Engine {
  factors?: Record<string, unknown>;
  metadata?: Partial<AgentMetadata>;
  /** Announces its factors, as engines of this project do. */
  announces?: boolean;
}

async function answering(linger: number, answer: () => readonly Uint8Array[]) {
  const router = new Router({ linger });
  await router.bind("tcp://127.0.0.1:*");
  onTestFinished(() => router.close());
  void (async () => {
    for await (const [route, delimiter] of router)
      await router.send([route as Buffer, delimiter as Buffer, ...answer()]);
  })().catch(() => {});
  return { router, port: Number(/\d+$/.exec(router.lastEndpoint ?? "")?.[0]) };
}

/**
 * A side channel as vLLM's: a ZMQ ROUTER that answers with a handshake. `change` replaces the
 * engine, as a restart does.
 */
async function sideChannel(engine: Engine = {}) {
  let [current, starts, asked] = [engine, 1, 0];
  const { port, router } = await answering(0, () => {
    asked += 1;
    const factors = { ...FACTORS, ...current.factors };
    const payload = encodeHandshakePayload({
      compatibilityHash: compatibilityHash(factors),
      agentMetadataBytes: encodeAgentMetadata({
        ...METADATA,
        engineId: `engine-${port}-${starts}`,
        ...current.metadata,
      }),
      extension: current.announces === true ? { version: 1, factors } : undefined,
      rest: {},
    });
    return encodeHandshakeReply(payload, 1);
  });
  return {
    port,
    change(next: Engine) {
      current = next;
      starts += 1;
    },
    close: () => router.close(),
    get asked() {
      return asked;
    },
  };
}

interface Scene {
  readonly prefill: readonly (InstanceSpec | number)[];
  readonly decode: readonly (InstanceSpec | number)[];
  readonly settings?: Partial<PairingSettings> | undefined;
  readonly versions?: Readonly<Record<string, string>>;
  readonly models?: readonly string[];
}

/** Pools of instances `p0`, `d0`, …; a number is the port of an instance's side channel. */
async function fleet({ prefill, decode, settings = {}, versions = {}, models = [] }: Scene) {
  const clock = systemClock();
  const { log, events: lines, logged } = recordedLog();
  const pairing = new Pairing({
    mode: "lenient",
    timeoutMs: 2000,
    refreshMs: 60_000,
    ...settings,
    clock,
    log,
    get: async ({ url, path }) => {
      if (path === "/v1/models")
        return { status: 200, body: JSON.stringify({ data: models.map((id) => ({ id })) }) };
      const version = versions[new URL(url).hostname];
      return { status: version === undefined ? 404 : 200, body: JSON.stringify({ version }) };
    },
  });
  onTestFinished(() => pairing.close());
  const pool = (role: Role, given: Scene["prefill"]) =>
    new InstancePool({
      role,
      instances: given.map((one, at) =>
        typeof one === "number"
          ? { url: `http://${role[0]}${at}:80`, kv: { host: "127.0.0.1", port: one } }
          : one,
      ),
      routing: roundRobin(),
      clock,
      random: systemRandom(),
      times: { coolDownMs: 1, maxCoolDownMs: 1, slowReturnMs: 1 },
      pairing,
    });
  const pools = { prefill: pool("prefill", prefill), decode: pool("decode", decode) };
  await pairing.settled();
  /** The pairs of so many requests. */
  const route = (count: number, avoiding: ReadonlySet<never> = new Set()) =>
    Array.from({ length: count }, () => {
      const p = pools.prefill.choose({ requestId: "r" }, new Set(), { avoiding });
      const d = p && pools.decode.choose({ requestId: "r" }, new Set(), p);
      return `${p && new URL(p.url).hostname}-${d && new URL(d.url).hostname}`;
    });
  const statusOf = (role: Role, at = 0) => pools[role].status()[at]?.pairing;
  const instance = (role: Role, at = 0) => pools[role].list()[at] as PooledInstance;
  return { pairing, pools, lines, logged, route, statusOf, instance };
}

/** A prefill and a decode instance of one engine. */
const selfPair = (port: number, settings?: Scene["settings"]) =>
  fleet({ prefill: [port], decode: [port], settings });

/** A prefill and a decode instance of these engines. */
async function pairOf(p: Engine, d: Engine, more: Partial<Scene> = {}) {
  const [prefill, decode] = [await sideChannel(p), await sideChannel(d)];
  return fleet({ prefill: [prefill.port], decode: [decode.port], ...more });
}

test("instances of two versions serve in their own pairs, and an announced factor is named where none fits", async () => {
  const v33 = await sideChannel({ announces: true });
  const v32 = await sideChannel({ factors: V32, announces: true });
  const { pools, logged, route, statusOf } = await fleet({
    prefill: [v33.port, v32.port],
    decode: [v33.port, v32.port],
  });
  expect(new Set(route(20))).toEqual(new Set(["p0-d0", "p1-d1"]));
  await pools.decode.remove({ url: "http://d1:80" });
  expect(new Set(route(20))).toEqual(new Set(["p0-d0"]));
  expect(statusOf("prefill", 1)).toMatchObject({
    state: "unpaired",
    partners: 0,
    differences: [
      { factor: "nixl_connector_version", prefill: "14", decode: "15" },
      { factor: "vllm_version", prefill: "0.32.0", decode: "0.33.0" },
    ],
  });
  expect(statusOf("prefill")).toMatchObject({ state: "paired", partners: 1, tp_size: null });
  await expect
    .poll(() => logged("instance-unpaired"))
    .toMatchObject([{ role: "prefill", instance: "http://p1:80" }]);
  expect([v33.asked, v32.asked]).toEqual([2, 2]);
});

const HALF = METADATA.blockLengthsBytes.map((length) => length / 2);
const HALVES = { blockLengthsBytes: HALF, blockStridesBytes: HALF };
const V31 = { factors: { vllm_version: "0.31.0", nixl_connector_version: 13 } };
const hash: unknown = expect.stringMatching(/^[0-9a-f]{16}…$/);

test.each<[string, Engine, Engine, Record<string, string>, string, unknown, unknown]>([
  [
    "of vLLM, which announces no factors, the versions that its servers answer are compared",
    {},
    { factors: V32 },
    { p0: "0.33.0", d0: "0.32.0" },
    "vllm_version",
    "0.33.0",
    "0.32.0",
  ],
  [
    "a factor that is not found is shown as the two hashes",
    {},
    { factors: { is_hma_enabled: false } },
    {},
    "compatibility_hash",
    hash,
    hash,
  ],
  [
    "equal hashes without a plan are no pair: the layout is named with both values",
    { metadata: { kvCacheLayout: "BHLNC" } },
    {},
    {},
    "kv_cache_layout",
    "BHLNC",
    METADATA.kvCacheLayout,
  ],
  [
    "a vLLM 0.31 decode worker with larger blocks than prefill's is no pair: its text would be wrong",
    { ...V31, metadata: { blockSize: METADATA.blockSize / 2, ...HALVES } },
    V31,
    { p0: "0.31.0", d0: "0.31.0" },
    "block_size",
    "16",
    "32",
  ],
])("%s", async (_, p, d, versions, factor, prefill, decode) => {
  const { pools, route, statusOf } = await pairOf(p, d, { versions });
  expect(route(1)).toEqual(["undefined-undefined"]);
  const [found, ...more] = statusOf("prefill")?.differences ?? [];
  expect([found, more]).toEqual([{ factor, prefill, decode }, []]);
  expect(pools.decode.pairingRefusal({ avoiding: new Set() })).toContain(
    `${factor} is ${found?.prefill} at prefill and ${found?.decode} at decode`,
  );
});

test("a factor that no server answers is found by a search, and the log has one line about it", async () => {
  const other = { factors: { is_hma_enabled: false } };
  const { lines, statusOf } = await pairOf({}, other, { models: ["tiny"] });
  await expect
    .poll(() => statusOf("prefill")?.differences)
    .toEqual([{ factor: "is_hma_enabled", prefill: "true", decode: "false" }]);
  await expect
    .poll(() => lines.filter(({ fields }) => fields["role"] === "prefill"))
    .toHaveLength(1);
});

test.each([
  ["push", "CPU_ATTN", "undefined-undefined"],
  ["push", "FLASH_ATTN", "p0-d0"],
  ["pull", "CPU_ATTN", "p0-d0"],
])(
  "another attention backend at prefill: %s into a vLLM decode worker with %s",
  async (mode, decode, routed) => {
    const at = { factors: { transfer_mode: mode } };
    const p = { ...at, metadata: { attentionBackend: "PLAIN" }, announces: true };
    const d = { ...at, metadata: { attentionBackend: decode } };
    const { route, statusOf } = await pairOf(p, d, { versions: { d0: "0.33.0" } });
    expect(route(1)).toEqual([routed]);
    const status = statusOf("prefill");
    if (routed === "p0-d0") return expect(status).toMatchObject({ state: "paired" });
    expect(status?.differences).toEqual([
      { factor: "attn_backend_name", prefill: "PLAIN", decode: "CPU_ATTN" },
    ]);
    expect(status?.reason).toContain("the text is wrong");
  },
);

test("TP sizes that are not configured follow from the lengths of the blocks", async () => {
  const { route, statusOf } = await pairOf({}, { metadata: HALVES });
  expect(route(1)).toEqual(["p0-d0"]);
  expect(statusOf("prefill")).toMatchObject({ state: "paired", reason: null });
});

test.each([
  ["engines that announce their factors", true],
  ["engines of vLLM, whose factors are searched", false],
])(
  "vllm#52516: nvfp4 at TP 1 and 2 is no pair, equal TP sizes are one: %s",
  async (_, announces) => {
    const engine = (heads: number) => {
      // 4 heads of 32 elements: K and V of a token take 18 bytes each.
      const blockLengthsBytes = HALF.map(() => METADATA.blockSize * heads * 2 * 18);
      return sideChannel({
        factors: { cache_dtype: "nvfp4", dtype: "torch.bfloat16" },
        announces,
        metadata: { blockLengthsBytes, blockStridesBytes: blockLengthsBytes },
      });
    };
    const [one, two] = [await engine(4), await engine(2)];
    const unlike = await fleet({ prefill: [one.port], decode: [two.port], models: ["tiny"] });
    await expect
      .poll(() => unlike.statusOf("decode")?.reason)
      .toContain(
        'blocks must be split by head, and blocks of cache dtype "nvfp4" do not keep heads and tokens apart',
      );
    expect(unlike.route(1)).toEqual(["undefined-undefined"]);
    const alike = await selfPair(one.port);
    expect(alike.route(1)).toEqual(["p0-d0"]);
  },
);

test.each([
  ["lenient", undefined, undefined, "p0-d0", "unverified"],
  ["label", undefined, undefined, "undefined-undefined", "unpaired"],
  ["label", "a", "a", "p0-d0", "unverified"],
  ["label", "a", "b", "undefined-undefined", "unpaired"],
  ["lenient", "a", "b", "undefined-undefined", "unpaired"],
  ["strict", "a", "a", "undefined-undefined", "unpaired"],
] as const)(
  "with mode %s and labels %s and %s, a side channel that cannot be read gives %s",
  async (mode, ours, theirs, pair, state) => {
    const { port } = await sideChannel();
    const { lines, route, statusOf } = await fleet({
      prefill: [{ url: "http://p0:80", label: ours, kv: { host: "127.0.0.1", port } }],
      decode: [{ url: "http://d0:80", label: theirs }],
      settings: { mode },
    });
    expect(route(1)).toEqual([pair]);
    expect(statusOf("decode")).toMatchObject({ state });
    await expect.poll(() => lines.map(({ event }) => event)).toContain(`instance-${state}`);
  },
);

test("an engine that is restarted as another version changes its pairs when it is back, and not before", async () => {
  const v33 = await sideChannel({ announces: true });
  const v32 = await sideChannel({ factors: V32, announces: true });
  const own = await sideChannel({ factors: V32, announces: true });
  const { route, statusOf, instance } = await fleet({
    prefill: [v33.port, v32.port],
    decode: [v33.port, own.port],
  });
  expect(new Set(route(20))).toEqual(new Set(["p0-d0", "p1-d1"]));
  own.change({ announces: true });
  const details = { stage: "connect" };
  instance("decode", 1)
    .begin()
    .failed(new KvError("KV_PROXY_UPSTREAM_FAILED", "x", { details }));
  // While it is not known what it is, the other pair serves.
  expect(statusOf("decode", 1)?.stale).toBe(true);
  expect(new Set(route(20))).toEqual(new Set(["p0-d0"]));
  await expect.poll(() => statusOf("decode", 1)?.stale).toBe(false);
  expect(new Set(route(20))).toEqual(new Set(["p0-d0", "p0-d1"]));
  expect(statusOf("prefill", 1)?.state).toBe("unpaired");
});

test("an answer that names another engine has the side channel read again; the ranks of one server are one engine", async () => {
  const own = await sideChannel({ metadata: { engineId: "e_dp0" } });
  const { pairing, instance, statusOf } = await selfPair(own.port);
  const engine = { host: "127.0.0.1", port: own.port, tpSize: 2, mode: "pull" } as const;
  const answer = (engineId: string) =>
    pairing.answered(instance("prefill"), { engineId, ...engine });
  expect(answer("e_dp1")).toBeUndefined();
  expect([own.asked, statusOf("prefill")?.tp_size]).toEqual([2, 2]);
  own.change({ factors: V32, metadata: { engineId: "f" } });
  await answer("f");
  expect(statusOf("prefill")).toMatchObject({ engine_id: "f", state: "unpaired" });
  // Where it cannot be read, the first answer waits for that, and the next ones do not.
  own.close();
  await answer("g");
  expect(statusOf("prefill")?.stale).toBe(true);
  expect(answer("g")).toBeUndefined();
});

test("whether an instance still has an engine is known after a reading, where it may have been restarted (issue 48)", async () => {
  const own = await sideChannel();
  const { pairing, instance } = await fleet({
    prefill: [{ url: "http://p:1" }],
    decode: [own.port],
  });
  const [p, d] = [instance("prefill"), instance("decode")];
  expect(await pairing.hasEngine(d, `engine-${own.port}-1`)).toBe("yes");
  expect(await pairing.hasEngine(d, "engine-0")).toBe("no");
  expect(await pairing.hasEngine(p, `engine-${own.port}-1`)).toBe("unknown");
  own.change({});
  pairing.failed(d);
  expect(await pairing.hasEngine(d, `engine-${own.port}-1`)).toBe("no");
  pairing.failed(d);
  own.close();
  expect(await pairing.hasEngine(d, `engine-${own.port}-2`)).toBe("unreadable");
});

test("the address of a side channel is learned from a first answer; that of another engine is refused", async () => {
  const own = await sideChannel();
  const { pairing, instance, statusOf } = await fleet({
    prefill: [{ url: "http://127.0.0.1:80" }],
    decode: [own.port],
  });
  expect(statusOf("prefill")).toMatchObject({ state: "unverified", side_channel: null });
  const answer = { engineId: "another", host: "0.0.0.0", port: own.port, tpSize: 1 };
  void pairing.answered(instance("prefill"), { ...answer, mode: "pull" });
  await pairing.settled();
  expect(statusOf("prefill")?.reason).toContain(`is that of engine engine-${own.port}-1`);
  expect(statusOf("prefill")?.state).toBe("unverified");
});

test.each([
  ["says nothing", (_socket: Socket) => {}, "no ZMQ greeting came within 300 ms"],
  [
    "speaks HTTP",
    (socket: Socket) => socket.write("HTTP/1.1 400 Bad Request\r\n\r\n".repeat(4)),
    "does not speak ZMQ",
  ],
  ["closes", (socket: Socket) => socket.destroy(), "closed the connection"],
  [
    "drips one byte at a time",
    (socket: Socket) => {
      const timer = setInterval(() => socket.write(Uint8Array.of(0xff)), 20);
      socket.on("close", () => clearInterval(timer));
    },
    "300 ms",
  ],
])("a side channel that %s is given up, and routing goes on", async (_, serve, reason) => {
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket.on("error", () => {}).on("close", () => sockets.delete(socket)));
    socket.resume();
    serve(socket);
  });
  const port = await listening(server);
  onTestFinished(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  const { route, statusOf } = await selfPair(port, { timeoutMs: 300 });
  expect(statusOf("prefill")?.reason).toContain(reason);
  expect(route(1)).toEqual(["p0-d0"]);
  await expect.poll(() => sockets.size).toBe(0);
});

const payloadOf = (agentMetadataBytes: Uint8Array) =>
  encodeHandshakePayload({ compatibilityHash: "ab", agentMetadataBytes, rest: {} });

test.each([
  ["garbage", Uint8Array.of(0xc1), "handshake reply"],
  ["a reply of 5 MiB", new Uint8Array(5 * 2 ** 20), "side channel"],
  ["metadata of no engine", payloadOf(Uint8Array.of(0x80)), "agent metadata"],
  [
    "an id of 10,000 characters",
    payloadOf(encodeAgentMetadata({ ...METADATA, engineId: "x".repeat(10_000) })),
    "10000 characters",
  ],
])("a side channel that answers %s is refused with the reason", async (_, frame, reason) => {
  // Not 0: libzmq 4.3.5 aborts the process if a peer leaves in the middle of a message while such a
  // socket closes (session_base.cpp:233).
  const { port } = await answering(1000, () => [
    frame,
    encodeHandshakeReply(new Uint8Array(0), 1)[1],
  ]);
  const { statusOf } = await selfPair(port, { mode: "strict" });
  expect(statusOf("prefill")).toMatchObject({ state: "unpaired" });
  expect(statusOf("prefill")?.reason).toContain(reason);
});

test("side channels with a key are read with handshakeKeyFile; without it, the log names both mechanisms and the setting", async () => {
  const handshakeKeyFile = join(scratchFolder(onTestFinished), "key");
  writeFileSync(handshakeKeyFile, "the shared key of this test", { mode: 0o600 });
  const encrypting = zmqSideChannel({ handshakeKeys: readHandshakeKeys("key", handshakeKeyFile) });
  onTestFinished(() => encrypting.close());
  const answer = () => RECORDED_REPLY;
  const { port } = await encrypting.listen({ host: "127.0.0.1", port: 0, answer });
  const { route } = await selfPair(port, { mode: "strict", handshakeKeyFile });
  expect(route(1)).toEqual(["p0-d0"]);
  const [warned] = (await selfPair(port)).logged("instance-unverified");
  expect(warned?.["reason"]).toMatch(/CURVE.*NULL/);
  expect(warned?.["hint"]).toContain("--handshake-key-file");
});

/** An engine whose id is configured. Each process has memory of its own. */
const configured = (engineId: string, factors = {}) =>
  sideChannel({
    announces: true,
    metadata: { engineId, baseAddresses: METADATA.baseAddresses.map(() => nextAddress++) },
    factors,
  });
let nextAddress = 0x7f00_0000_0000;

test("of two engines that came together with one id neither serves; the reason has the id and both URLs", async () => {
  const [one, two] = [await configured("prefill"), await configured("prefill")];
  const [other, decode] = [await configured("other"), await configured("d")];
  const prefill = [one.port, two.port, other.port];
  const { pairing, pools, logged, route, instance } = await fleet({
    prefill,
    decode: [decode.port],
  });
  expect(new Set(route(6))).toEqual(new Set(["p2-d0"]));
  const [first, second, third] = pools.prefill.status().map((status) => status.pairing);
  expect([first?.state, second?.state, third?.state]).toEqual(["unpaired", "unpaired", "paired"]);
  expect(first?.reason).toContain(
    "engine_id is prefill of two instances http://p0:80 http://p1:80 at prefill and unique at",
  );
  expect(logged("instance-unpaired")).toHaveLength(2);
  // The second one gets an id of its own.
  two.change({ metadata: { engineId: "second" } });
  pairing.failed(instance("prefill", 1));
  await expect.poll(() => new Set(route(6)).size, { timeout: 3000 }).toBe(3);
});

test("an engine keeps its id when another one comes with it; that one serves when the first has left", async () => {
  const [one, two] = [await configured("prefill"), await configured("prefill")];
  const decode = await sideChannel();
  const { pairing, pools, route, statusOf } = await fleet({
    prefill: [one.port],
    decode: [decode.port],
  });
  pools.prefill.add({ url: "http://p1", kv: { host: "127.0.0.1", port: two.port } });
  await pairing.settled();
  expect(new Set(route(4))).toEqual(new Set(["p0-d0"]));
  expect(statusOf("prefill", 1)?.reason).toContain(
    "prefill of two instances http://p1 http://p0:80",
  );
  await pools.prefill.remove({ url: "http://p0:80" });
  expect(new Set(route(4))).toEqual(new Set(["p1-d0"]));
});

test("an engine of both roles stays a pair with itself while one of two readings is older", async () => {
  const both = await configured("both");
  const { pairing, instance, route, statusOf } = await selfPair(both.port);
  both.change({
    metadata: { engineId: "both", baseAddresses: METADATA.baseAddresses.map(() => 4096) },
  });
  pairing.failed(instance("prefill"));
  await expect.poll(() => statusOf("prefill")?.stale, { timeout: 3000 }).toBe(false);
  expect(route(1)).toEqual(["p0-d0"]);
});

test.each([
  ["one server by two names", "p", "pull", true],
  ["two decode engines, whose blocks nobody reads", "d", "pull", true],
  ["two decode engines that register for push", "d", "push", false],
  ["a prefill and a decode engine", "pd", "pull", false],
] as const)("one engine id of %s", async (_, which, mode, serve) => {
  const factors = { transfer_mode: mode };
  const own = async (id: string) => (await configured(id, factors)).port;
  const [p, d] = [
    await own(which === "pd" ? "same" : "p"),
    await own(which === "p" ? "d" : "same"),
  ];
  const prefill = which === "p" ? [p, p] : [p];
  const decode = which === "d" ? [d, await own("same")] : [d];
  const { route } = await fleet({ prefill, decode });
  expect(route(2).every((pair) => !pair.includes("undefined"))).toBe(serve);
});

test("an engine id that two decode instances have is no name of either", async () => {
  const [one, two] = [await configured("e"), await configured("e")];
  const { pairing, instance } = await fleet({ prefill: [], decode: [one.port, two.port] });
  const [first, second] = [instance("decode"), instance("decode", 1)];
  for (const d of [first, second]) expect(await pairing.hasEngine(d, "e")).toBe("shared");
  two.change({ metadata: { engineId: "f" } });
  pairing.failed(second);
  expect(await pairing.hasEngine(second, "f")).toBe("yes");
  expect(await pairing.hasEngine(first, "e")).toBe("yes");
});
