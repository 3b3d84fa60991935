// Calls that crash a process when they are made to NIXL directly, and that the suite of transports
// does not make. Made to the addon, each must end in a KvError or do no harm.
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { KvError, type KvErrorCode } from "@kv/interface";
import { deviceMemory, findLibrary, nixlTransport, openFileMemory } from "@kv/nixl";
import { codeOf } from "../support/code-of.js";
import { blocksOf, pairOf } from "../support/pair.js";

const LENGTH = 1 << 20;
const IDS = Int32Array.of(0, 1, 2);
const transport = nixlTransport({ backends: [process.env["NIXL_BACKEND"] ?? ""] });

/** Requires that the call ends in a KvError with this code. */
async function refused(act: () => unknown, code: string): Promise<void> {
  const ended = await codeOf((async () => act())());
  if (ended !== code) throw new Error(`expected ${code} of ${act}, got ${ended}`);
}

/** Two agents, and whether they still work. */
async function pair() {
  const world = await pairOf(transport, LENGTH, 1024);
  const { target, source, local, remote, move } = world;
  source.bytes.fill(9);
  const works = async () => {
    await move("READ", IDS).done;
    if (target.bytes[0] !== 9) throw new Error("the READ did not arrive");
  };
  const request = { operation: "READ", local, localIds: IDS, remote, remoteIds: IDS } as const;
  return { ...world, request, works };
}

/** A call for each of these members, which has a wrong value. */
const each = (names: readonly string[], call: (wrong: object) => unknown) =>
  names.map((name) => (bad: never) => call({ [name]: bad }));

const CALLS: Readonly<Record<string, () => Promise<void>>> = {
  async "names of peers: NUL, empty, the agent's own"() {
    const { reader, works } = await pair();
    const table = { memoryType: "DRAM", rows: new Float64Array(5) } as const;
    for (const name of ["", "a\0b"]) {
      for (const call of [
        () => reader.notify(name, new Uint8Array(1)),
        () => reader.removeRemote(name),
        () => reader.prepareRemote(name, table),
      ])
        await refused(call, "KV_AGENT_UNKNOWN_REMOTE");
    }
    const own = async () => reader.addRemote(await reader.localMetadata());
    await refused(own, "KV_AGENT_METADATA_INVALID");
    await works();
  },
  async "numbers that are too large, and arrays of the wrong kind"() {
    const { reader, target, request, works } = await pair();
    const shared = new Int32Array(new SharedArrayBuffer(4));
    for (const bad of [Int32Array.of(2 ** 31 - 1), new Float64Array(1), new Uint32Array(1), shared])
      await refused(
        () => reader.transfer({ ...request, localIds: bad as Int32Array }).done,
        "KV_TRANSFER_INVALID",
      );
    for (const table of [
      blocksOf(target, 1024, 2 ** 40),
      blocksOf(target, 2 ** 53, 1),
      blocksOf({ ...target, deviceId: 0.5 }, 1024, 1),
      { ...blocksOf(target, 1024, 1), memoryType: "FILE" as const },
    ])
      await refused(() => reader.prepareLocal(table), "KV_LIST_INVALID");
    const eight = Float64Array.of(0, 8);
    for (const call of [
      () => transport.allocate(2 ** 50),
      () => target.gather(Float64Array.of(2 ** 60, 1)),
      () => target.gather(Float64Array.of(0)),
      () => target.scatter(eight, new SharedArrayBuffer(8) as never),
    ])
      await refused(call, "KV_MEMORY_INVALID");
    await works();
    await reader.close();
    target.close();
    await refused(() => target.gather(eight), "KV_MEMORY_INVALID");
  },
  async "backends: none, unknown, twice, of the wrong kind"() {
    const creates = (backends: unknown) => () =>
      transport.createAgent({ backends: backends as never });
    for (const backends of [[], [{ name: "../../tmp/x" }], [{ name: "UCX" }, { name: "UCX" }]])
      await refused(creates(backends), "KV_BACKEND_UNAVAILABLE");
    for (const backends of [
      null,
      "UCX",
      [null],
      [7],
      [[]],
      [{ name: 7 }],
      [{ name: ["UCX"] }],
      {},
    ]) {
      await refused(creates(backends), "KV_BACKEND_UNAVAILABLE");
      await refused(() => nixlTransport({ backends: backends as never }), "KV_BACKEND_UNAVAILABLE");
    }
  },
  async "a truncated plugin and a truncated library"() {
    const folder = await mkdtemp(join(tmpdir(), "kv-nixl-cut-"));
    const libraryPath = await findLibrary();
    const cut = async (from: string, name: string) => {
      const path = join(folder, name);
      await writeFile(path, (await readFile(from)).subarray(0, 30_000));
      return path;
    };
    try {
      const library = await cut(libraryPath, "libnixl_capi.so");
      await refused(() => nixlTransport({ library }).createAgent(), "KV_LIBRARY_INCOMPATIBLE");
      await cut(join(dirname(libraryPath), "plugins", "libplugin_UCX.so"), "libplugin_UCX.so");
      const env = { NIXL_PLUGIN_DIR: folder };
      await refused(() => nixlTransport({ env }).createAgent(), "KV_BACKEND_UNAVAILABLE");
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
  },
  async "backend parameters: not strings, with NUL, without a name, or unreadable for NIXL"() {
    const ucx = (parameters: unknown) => ({ backends: [{ name: "UCX", parameters }] as never });
    const creates = (parameters: unknown) => () => transport.createAgent(ucx(parameters));
    const wrong = [
      ...[1, Number.NaN, true, null, undefined, {}, ["2"], 2n, Symbol("2"), () => "2", "2\0"],
      // Older versions of NIXL would silently use their default.
      "many",
    ].map((num_workers) => ({ num_workers }));
    for (const parameters of wrong) {
      await refused(creates(parameters), "KV_AGENT_INVALID");
      await refused(() => nixlTransport(ucx(parameters)), "KV_AGENT_INVALID");
    }
    for (const parameters of [null, 1, "num_workers=2", ["2"], { "": "2" }, { "a\0": "2" }])
      await refused(creates(parameters), "KV_AGENT_INVALID");
    await refused(creates({ ucx_error_handling_mode: "many" }), "KV_BACKEND_UNAVAILABLE");
    await (await creates({ num_workers: "2" })()).close();
  },
  async "options and arguments of the wrong kind"() {
    const { reader, owner, target, request, works } = await pair();
    const [prepared, peer] = [blocksOf(target, 1024, 1), owner.name];
    const calls: Partial<Record<KvErrorCode, ((bad: never) => unknown)[]>> = {
      KV_CONFIG_INVALID: [
        (bad) => nixlTransport(bad),
        (bad) => nixlTransport({ env: { UCX_TLS: bad } }),
        ...each(["env", "library", "checkMetadata"], nixlTransport),
      ],
      KV_AGENT_INVALID: [
        (bad) => transport.createAgent(bad),
        (bad) => transport.createAgent({ name: bad }),
        (bad) => reader.close(bad),
        (bad) => reader.close({ timeoutMs: bad }),
      ],
      KV_MEMORY_INVALID: [
        (bad) => transport.allocate(4096, bad),
        (bad) => transport.allocate(bad),
        (bad) => target.gather(bad),
        (bad) => target.scatter(bad, new ArrayBuffer(1)),
        (bad) => target.scatter(Float64Array.of(0, 1), bad),
        (bad) => openFileMemory(bad, { lengthBytes: 1 }),
        (bad) => openFileMemory("/nowhere", bad),
        (bad) => openFileMemory("/nowhere", { lengthBytes: bad }),
        (bad) => deviceMemory(bad),
        (bad) => deviceMemory({ address: bad, lengthBytes: 1, deviceId: 0 }),
        (bad) => reader.register(bad),
      ],
      KV_TRANSPORT_UNSUPPORTED: [
        ...each(["memoryType", "deviceId"], (wrong) => transport.allocate(4096, wrong)),
      ],
      KV_AGENT_METADATA_INVALID: [(bad) => reader.addRemote(bad)],
      KV_AGENT_UNKNOWN_REMOTE: [
        (bad) => reader.removeRemote(bad),
        (bad) => reader.notify(bad, new Uint8Array(1)),
        (bad) => reader.prepareRemote(bad, prepared),
      ],
      KV_NOTIFICATION_INVALID: [(bad) => reader.notify(peer, bad)],
      KV_LIST_INVALID: [
        (bad) => reader.prepareLocal(bad),
        ...each(["memoryType", "rows"], (wrong) => reader.prepareLocal({ ...prepared, ...wrong })),
        (bad) => reader.prepareRemote(peer, bad),
      ],
      KV_TRANSFER_INVALID: [
        (bad) => reader.transfer(bad).done,
        (bad) => reader.transfer({ ...request, remote: bad, notification: new Uint8Array(1) }).done,
        ...each(
          ["operation", "local", "localIds", "notification", "signal", "timeoutMs"],
          (wrong) => reader.transfer({ ...request, ...wrong }).done,
        ),
      ],
    };
    for (const bad of [null, -1n, Symbol("bad"), () => {}]) {
      for (const [code, acts] of Object.entries(calls))
        for (const act of acts) await refused(() => act(bad as never), code);
    }
    const wrong: object[] = [
      ...[{}, { aborted: false }, { aborted: true, addEventListener: 1 }].map((signal) => ({
        signal,
      })),
      { timeoutMs: "5" },
    ];
    for (const bad of wrong)
      await refused(() => reader.transfer({ ...request, ...bad }), "KV_TRANSFER_INVALID");
    const noName = () => reader.prepareRemote(undefined as never, prepared);
    await refused(noName, "KV_AGENT_UNKNOWN_REMOTE");
    const { transfersPosted } = reader.telemetry();
    if (transfersPosted !== 0)
      throw new Error("a transfer was posted before its options were looked at");
    await works();
  },
  async "damaged metadata, outside the backend's own data"() {
    const { reader, owner, works } = await pair();
    const stranger = await transport.createAgent({ name: "stranger" });
    await stranger.register(transport.allocate(4096));
    const metadata = await stranger.localMetadata();
    const text = Buffer.from(metadata).toString("latin1");
    // Where the backend's own data begins and ends: only authentication detects damage in it.
    const opaque = [text.indexOf("|c") + 10, text.indexOf("MemSection") - 9] as const;
    const key = text.indexOf("|n") + 46;
    for (let at = 0; at < metadata.length; at++) {
      if ((at >= opaque[0] && at < opaque[1]) || at >= key) continue;
      for (const bit of [1, 128]) {
        const damaged = metadata.slice();
        damaged[at] = (damaged[at] ?? 0) ^ bit;
        const name = await reader.addRemote(damaged).catch((error: unknown) => {
          if (!KvError.is(error, "KV_AGENT_METADATA_INVALID")) throw error;
          return undefined;
        });
        if (name !== undefined) await reader.removeRemote(name);
      }
      await refused(() => reader.addRemote(metadata.slice(0, at)), "KV_AGENT_METADATA_INVALID");
    }
    for (const bad of [undefined, "text", new Uint16Array(4)]) {
      await refused(() => reader.addRemote(bad as never), "KV_AGENT_METADATA_INVALID");
    }
    // A known peer with other connection data, while its lists are prepared: the lists stay valid.
    const forged = Buffer.from(await owner.localMetadata());
    forged[text.indexOf("|c") + 40] = (forged[text.indexOf("|c") + 40] ?? 0) ^ 1;
    await refused(() => reader.addRemote(forged), "KV_AGENT_METADATA_INVALID");
    await works();
  },
};

const name = process.argv[2] ?? "";
if (name === "list") process.stdout.write(JSON.stringify(Object.keys(CALLS)));
else {
  await CALLS[name]?.();
  await transport.close();
  process.stdout.write("survived");
}
