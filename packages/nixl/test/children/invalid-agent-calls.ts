// Invalid calls about agents, their backends and options, and data of peers.
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { KvError, type KvErrorCode } from "@kv/interface";
import { deviceMemory, findLibrary, nixlTransport, openFileMemory } from "@kv/nixl";
import { pair, refused, transport } from "./invalid-calls-fixture.js";

export const INVALID_AGENT_CALLS: Readonly<Record<string, () => Promise<void>>> = {
  async "names: NUL, empty, too long, unknown, the agent's own"() {
    const { reader, works } = await pair();
    for (const name of ["", "a\0b", "x".repeat(256), "é"])
      await refused(() => transport.createAgent({ name }), "KV_AGENT_INVALID");
    for (const name of ["", "a\0b", "nobody"]) {
      await refused(() => reader.notify(name, new Uint8Array(1)), "KV_AGENT_UNKNOWN_REMOTE");
      await refused(() => reader.removeRemote(name), "KV_AGENT_UNKNOWN_REMOTE");
      await refused(
        () => reader.prepareRemote(name, { memoryType: "DRAM", rows: new Float64Array(5) }),
        "KV_AGENT_UNKNOWN_REMOTE",
      );
    }
    await refused(
      async () => reader.addRemote(await reader.localMetadata()),
      "KV_AGENT_METADATA_INVALID",
    );
    await works();
  },
  async "backends: none, unknown, twice, of the wrong kind"() {
    const backend = (name: string) => transport.createAgent({ backends: [{ name }] });
    await refused(() => backend("NO_SUCH"), "KV_BACKEND_UNAVAILABLE");
    await refused(() => backend("../../tmp/x"), "KV_BACKEND_UNAVAILABLE");
    await refused(() => transport.createAgent({ backends: [] }), "KV_BACKEND_UNAVAILABLE");
    await refused(
      () => transport.createAgent({ backends: [{ name: "UCX" }, { name: "UCX" }] }),
      "KV_BACKEND_UNAVAILABLE",
    );
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
      await refused(
        () => transport.createAgent({ backends: backends as never }),
        "KV_BACKEND_UNAVAILABLE",
      );
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
    const ucx = (parameters: unknown) => [
      { name: "UCX", parameters: parameters as Record<string, string> },
    ];
    for (const value of [
      1,
      Number.NaN,
      true,
      null,
      undefined,
      {},
      ["2"],
      2n,
      Symbol("2"),
      () => "2",
      "2\0",
    ]) {
      await refused(
        () => transport.createAgent({ backends: ucx({ num_workers: value }) }),
        "KV_AGENT_INVALID",
      );
      await refused(
        () => nixlTransport({ backends: ucx({ num_workers: value }) }),
        "KV_AGENT_INVALID",
      );
    }
    for (const parameters of [null, 1, "num_workers=2", ["2"], { "": "2" }, { "a\0": "2" }]) {
      await refused(() => transport.createAgent({ backends: ucx(parameters) }), "KV_AGENT_INVALID");
    }
    // Older versions of NIXL would silently use their default.
    await refused(
      () => transport.createAgent({ backends: ucx({ num_workers: "many" }) }),
      "KV_AGENT_INVALID",
    );
    await refused(
      () => transport.createAgent({ backends: ucx({ ucx_error_handling_mode: "many" }) }),
      "KV_BACKEND_UNAVAILABLE",
    );
    await (await transport.createAgent({ backends: ucx({ num_workers: "2" }) })).close();
  },
  async "options and arguments of the wrong kind"() {
    const { reader, owner, target, request, table, works } = await pair();
    const [prepared, peer] = [table(target.address), owner.name];
    type Call = readonly [code: KvErrorCode, act: (bad: never) => unknown];
    const calls: readonly Call[] = [
      ["KV_CONFIG_INVALID", (bad) => nixlTransport(bad)],
      ["KV_CONFIG_INVALID", (bad) => nixlTransport({ env: bad })],
      ["KV_CONFIG_INVALID", (bad) => nixlTransport({ env: { UCX_TLS: bad } })],
      ["KV_CONFIG_INVALID", (bad) => nixlTransport({ library: bad })],
      ["KV_CONFIG_INVALID", (bad) => nixlTransport({ checkMetadata: bad })],
      ["KV_AGENT_INVALID", (bad) => transport.createAgent(bad)],
      ["KV_AGENT_INVALID", (bad) => transport.createAgent({ name: bad })],
      ["KV_MEMORY_INVALID", (bad) => transport.allocate(4096, bad)],
      ["KV_MEMORY_INVALID", (bad) => transport.allocate(bad)],
      ["KV_TRANSPORT_UNSUPPORTED", (bad) => transport.allocate(4096, { memoryType: bad })],
      ["KV_TRANSPORT_UNSUPPORTED", (bad) => transport.allocate(4096, { deviceId: bad })],
      ["KV_MEMORY_INVALID", (bad) => target.gather(bad)],
      ["KV_MEMORY_INVALID", (bad) => target.scatter(bad, new ArrayBuffer(1))],
      ["KV_MEMORY_INVALID", (bad) => target.scatter(Float64Array.of(0, 1), bad)],
      ["KV_MEMORY_INVALID", (bad) => openFileMemory(bad, { lengthBytes: 1 })],
      ["KV_MEMORY_INVALID", (bad) => openFileMemory("/nowhere", bad)],
      ["KV_MEMORY_INVALID", (bad) => openFileMemory("/nowhere", { lengthBytes: bad })],
      ["KV_MEMORY_INVALID", (bad) => deviceMemory(bad)],
      ["KV_MEMORY_INVALID", (bad) => deviceMemory({ address: bad, lengthBytes: 1, deviceId: 0 })],
      ["KV_MEMORY_INVALID", (bad) => reader.register(bad)],
      ["KV_AGENT_METADATA_INVALID", (bad) => reader.addRemote(bad)],
      ["KV_AGENT_UNKNOWN_REMOTE", (bad) => reader.removeRemote(bad)],
      ["KV_AGENT_UNKNOWN_REMOTE", (bad) => reader.notify(bad, new Uint8Array(1))],
      ["KV_NOTIFICATION_INVALID", (bad) => reader.notify(peer, bad)],
      ["KV_LIST_INVALID", (bad) => reader.prepareLocal(bad)],
      ["KV_LIST_INVALID", (bad) => reader.prepareLocal({ ...prepared, memoryType: bad })],
      ["KV_LIST_INVALID", (bad) => reader.prepareLocal({ ...prepared, rows: bad })],
      ["KV_LIST_INVALID", (bad) => reader.prepareRemote(peer, bad)],
      ["KV_AGENT_UNKNOWN_REMOTE", (bad) => reader.prepareRemote(bad, prepared)],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer(bad).done],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, operation: bad }).done],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, local: bad }).done],
      [
        "KV_TRANSFER_INVALID",
        (bad) => reader.transfer({ ...request, remote: bad, notification: new Uint8Array(1) }).done,
      ],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, localIds: bad }).done],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, notification: bad }).done],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, signal: bad }).done],
      ["KV_TRANSFER_INVALID", (bad) => reader.transfer({ ...request, timeoutMs: bad }).done],
      ["KV_AGENT_INVALID", (bad) => reader.close(bad)],
      ["KV_AGENT_INVALID", (bad) => reader.close({ timeoutMs: bad })],
    ];
    for (const bad of [null, -1n, Symbol("bad"), () => {}]) {
      for (const [code, act] of calls) await refused(() => act(bad as never), code);
    }
    for (const signal of [{}, { aborted: false }, { aborted: true, addEventListener: 1 }]) {
      await refused(
        () => reader.transfer({ ...request, signal: signal as never }),
        "KV_TRANSFER_INVALID",
      );
    }
    await refused(
      () => reader.transfer({ ...request, timeoutMs: "5" as never }),
      "KV_TRANSFER_INVALID",
    );
    await refused(
      () => reader.prepareRemote(undefined as never, prepared),
      "KV_AGENT_UNKNOWN_REMOTE",
    );
    const { transfersPosted } = reader.telemetry();
    if (transfersPosted !== 0)
      throw new Error("a transfer was posted before its options were looked at");
    await works();
  },
  async "everything after close, and close again"() {
    const { reader, owner, target, local, request, table } = await pair();
    const metadata = await owner.localMetadata();
    const transfer = reader.transfer(request);
    await Promise.all([reader.close(), reader.close()]);
    await transfer.done;
    await transfer.released;
    await refused(() => reader.transfer(request), "KV_AGENT_CLOSED");
    await refused(() => reader.register(target), "KV_AGENT_CLOSED");
    await refused(() => reader.addRemote(metadata), "KV_AGENT_CLOSED");
    await refused(() => reader.prepareLocal(table(target.address)), "KV_AGENT_CLOSED");
    await refused(() => reader.notify(owner.name, new Uint8Array(1)), "KV_AGENT_CLOSED");
    await local.close();
    reader.telemetry();
    target.close();
    await transport.close();
    await refused(() => transport.createAgent(), "KV_TRANSPORT_CLOSED");
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
