// Invalid calls about memory, lists and copies.
import { deviceMemory } from "@kv/nixl";
import { LENGTH, pair, refused, transport } from "./invalid-calls-fixture.js";

export const INVALID_LIST_CALLS: Readonly<Record<string, () => Promise<void>>> = {
  async "indices out of range, negative, none, unequal, of the wrong kind"() {
    const { reader, request, works } = await pair();
    const ids = (localIds: unknown, remoteIds: unknown) => () =>
      reader.transfer({
        ...request,
        localIds: localIds as Int32Array,
        remoteIds: remoteIds as Int32Array,
      }).done;
    const one = Int32Array.of(0);
    for (const bad of [
      Int32Array.of(1024),
      Int32Array.of(-1),
      Int32Array.of(2 ** 31 - 1),
      new Int32Array(0),
      Int32Array.of(0, 1),
    ]) {
      await refused(ids(bad, one), "KV_TRANSFER_INVALID");
      await refused(ids(one, bad), "KV_TRANSFER_INVALID");
    }
    const shared = new Int32Array(new SharedArrayBuffer(4));
    for (const bad of [undefined, null, [0], new Float64Array(1), new Uint32Array(1), shared]) {
      await refused(ids(bad, one), "KV_TRANSFER_INVALID");
    }
    await works();
  },
  async "lists of the other side, of another agent, and closed"() {
    const { reader, owner, request, local, remote, table, target, works } = await pair();
    await refused(() => reader.transfer({ ...request, local: remote }).done, "KV_TRANSFER_INVALID");
    await refused(() => reader.transfer({ ...request, remote: local }).done, "KV_TRANSFER_INVALID");
    await refused(() => owner.transfer(request).done, "KV_TRANSFER_INVALID");
    const closed = await reader.prepareLocal(table(target.address));
    await Promise.all([closed.close(), closed.close()]);
    await refused(() => reader.transfer({ ...request, local: closed }).done, "KV_LIST_CLOSED");
    await works();
  },
  async "byte lengths that differ within a pair"() {
    const { reader, request, table, target, works } = await pair();
    const wide = await reader.prepareLocal(table(target.address, 2048, 0, 2048, 8));
    await refused(() => reader.transfer({ ...request, local: wide }).done, "KV_TRANSFER_INVALID");
    await works();
  },
  async "invalid tables, and tables of memory that is not registered"() {
    const { reader, owner, target, table, works } = await pair();
    const bad: number[][] = [
      [0, 0, 1024, 1],
      [1024, 0, 1024, 0],
      [1024, 0.5, 1024, 1],
      [-1, 0, 0, 1],
      [Number.NaN, 0, 0, 1],
    ];
    bad.push([1024, 0, 1024, 2 ** 40], [2 ** 53, 0, 0, 1], [1024, 0, Number.POSITIVE_INFINITY, 2]);
    for (const row of bad)
      await refused(() => reader.prepareLocal(table(target.address, ...row)), "KV_LIST_INVALID");
    await refused(
      () => reader.prepareLocal({ memoryType: "DRAM", rows: new Float64Array(4) }),
      "KV_LIST_INVALID",
    );
    await refused(
      () => reader.prepareLocal({ memoryType: "DRAM", rows: new Float64Array(0) }),
      "KV_LIST_INVALID",
    );
    await refused(
      () => reader.prepareLocal({ memoryType: "FILE" as "DRAM", rows: new Float64Array(5) }),
      "KV_LIST_INVALID",
    );
    const outside: [number, number[]][] = [
      [target.address + LENGTH, [1, 0, 1, 1]],
      [target.address - 1, [1024, 0, 1024, 1]],
    ];
    outside.push(
      [target.address, [1024, 0, 1024, LENGTH / 1024 + 1]],
      [target.address, [1024, 1, 1024, 1]],
      [4096, [4096, 0, 0, 1]],
    );
    for (const [base, row] of outside) {
      await refused(() => reader.prepareLocal(table(base, ...row)), "KV_MEMORY_NOT_REGISTERED");
      await refused(() => reader.prepareRemote(owner.name, table(base, ...row)), "KV_LIST_INVALID");
    }
    await works();
  },
  async "memory of another transport, of size 0, in use, and closed"() {
    const { reader, target, registration, local, works } = await pair();
    for (const size of [0, -1, 1.5, Number.NaN, 2 ** 53, 2 ** 50])
      await refused(() => transport.allocate(size), "KV_MEMORY_INVALID");
    await refused(
      () => transport.allocate(4096, { memoryType: "VRAM" }),
      "KV_TRANSPORT_UNSUPPORTED",
    );
    await refused(() => reader.register({ ...target }), "KV_MEMORY_INVALID");
    await refused(() => target.close(), "KV_MEMORY_IN_USE");
    await refused(() => registration.close(), "KV_MEMORY_IN_USE");
    let moved = false;
    try {
      structuredClone(target.bytes.buffer, { transfer: [target.bytes.buffer as ArrayBuffer] });
      moved = target.bytes.length === 0;
    } catch {
      // Refused, as expected.
    }
    if (moved) throw new Error("registered memory was transferred away");
    await works();
    await local.close();
    await Promise.all([registration.close(), registration.close()]);
    target.close();
    target.close();
    await refused(() => reader.register(target), "KV_MEMORY_INVALID");
    await refused(() => target.gather(Float64Array.of(0, 1)), "KV_MEMORY_INVALID");
    // Empty, or zeros where Node cannot detach the buffer.
    if ((target.bytes[0] ?? 0) !== 0) throw new Error("the view still shows the memory");
  },
  async "addresses that are no device memory, and VRAM lists of host memory"() {
    const { reader, owner, target, source, table, works } = await pair();
    const ofDevice = ({ address }: { address: number }) => ({
      ...table(address),
      memoryType: "VRAM" as const,
    });
    await refused(() => reader.prepareLocal(ofDevice(target)), "KV_MEMORY_NOT_REGISTERED");
    await refused(() => reader.prepareRemote(owner.name, ofDevice(source)), "KV_LIST_INVALID");
    for (const address of [target.address, 2 ** 46]) {
      const memory = deviceMemory({ address, lengthBytes: LENGTH, deviceId: 0 });
      await refused(() => reader.register(memory), "KV_MEMORY_INVALID");
      await refused(() => reader.register({ ...memory }), "KV_MEMORY_INVALID");
      memory.close();
    }
    await works();
  },
  async "copies beyond the memory, or with the wrong length"() {
    const { target, works } = await pair();
    for (const run of [
      [0, LENGTH + 1],
      [LENGTH, 1],
      [-1, 1],
      [0.5, 1],
      [Number.NaN, 1],
      [2 ** 60, 1],
      [0],
      [0, 1, 2],
    ]) {
      await refused(() => target.gather(Float64Array.from(run)), "KV_MEMORY_INVALID");
      await refused(
        () => target.scatter(Float64Array.from(run), new ArrayBuffer(1)),
        "KV_MEMORY_INVALID",
      );
    }
    await refused(
      () => target.scatter(Float64Array.of(0, 8), new ArrayBuffer(7)),
      "KV_MEMORY_INVALID",
    );
    await refused(
      () => target.scatter(Float64Array.of(0, 8), new SharedArrayBuffer(8) as never),
      "KV_MEMORY_INVALID",
    );
    await works();
  },
};
