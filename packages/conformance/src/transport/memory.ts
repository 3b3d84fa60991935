import { expect, test } from "vitest";
import { expectError, expectThrown } from "../expect-error.js";
import { expectBytes, type Fixture, pattern } from "./fixture.js";

export function memoryTests(fixture: Fixture): void {
  test("memory is page-aligned, zeroed, disjoint from other memory, and has addresses below 2^53", () => {
    const memories = [1, 4096, 100_000].map((length) => fixture.memory(length));
    for (const memory of memories) {
      expect(memory.address % 4096).toBe(0);
      expect(memory.address).toBeGreaterThan(0);
      expect(memory.address + memory.lengthBytes).toBeLessThan(2 ** 53);
      expect(memory.bytes.length).toBe(memory.lengthBytes);
      expect(memory.bytes.every((byte) => byte === 0)).toBe(true);
      for (const other of memories) {
        if (other === memory) continue;
        const apart =
          other.address >= memory.address + memory.lengthBytes ||
          memory.address >= other.address + other.lengthBytes;
        expect(apart).toBe(true);
      }
    }
  });

  test("invalid lengths are rejected", () => {
    for (const length of [0, -1, 1.5, Number.NaN, Number.POSITIVE_INFINITY, 2 ** 53]) {
      expectThrown(
        () => fixture.transport.allocate(length),
        "KV_MEMORY_INVALID",
        "KV_TRANSPORT_UNSUPPORTED",
      );
    }
  });

  test("a view is a part of the memory, and a part outside of it is rejected", () => {
    const memory = fixture.memory(8192);
    memory.bytes.set(pattern(8192, 1));
    const part = memory.view(4000, 192);
    expect(part).toEqual(pattern(8192, 1).subarray(4000, 4192));
    part[0] = 255;
    expect(memory.bytes[4000]).toBe(255);
    expect(memory.view(8192, 0).length).toBe(0);
    for (const [offset, length] of [
      [-1, 4],
      [0, -1],
      [8000, 193],
      [0.5, 1],
      [0, Number.NaN],
    ] as const) {
      expectThrown(() => memory.view(offset, length), "KV_MEMORY_INVALID");
    }
    memory.close();
    expectThrown(() => memory.view(0, 1), "KV_MEMORY_INVALID");
  });

  test("gather copies runs out in order, and scatter copies them back", async () => {
    const memory = fixture.memory(8192);
    memory.bytes.set(pattern(8192, 1));
    const runs = Float64Array.of(4096, 100, 0, 50, 8100, 92);
    const taken = new Uint8Array(await fixture.waitFor(memory.gather(runs)));
    const all = pattern(8192, 1);
    expect(taken).toEqual(
      Uint8Array.of(
        ...all.subarray(4096, 4196),
        ...all.subarray(0, 50),
        ...all.subarray(8100, 8192),
      ),
    );
    const other = fixture.memory(8192);
    const copy = taken.slice();
    const written = new Uint8Array(await fixture.waitFor(other.scatter(runs, taken.buffer)));
    expect(written).toEqual(copy);
    // It can be used again.
    await fixture.waitFor(other.scatter(runs, written.buffer));
    expectBytes(other.bytes, all.fill(0, 50, 4096).fill(0, 4196, 8100));
  });

  test("runs outside the memory and sources of another length are rejected, and nothing is copied", async () => {
    const memory = fixture.memory(4096);
    for (const runs of [
      [4000, 97],
      [-1, 4],
      [0, -4],
      [0.5, 4],
      [Number.NaN, 4],
      [0, 4, 8],
      // Runs that repeat bytes have more than the memory.
      [0, 4096, 0, 1],
    ]) {
      const rows = Float64Array.from(runs);
      await expectError(() => memory.gather(rows), "KV_MEMORY_INVALID");
      const { buffer } = new Uint8Array(runs[1] === 4096 ? 4097 : 4).fill(255);
      await expectError(() => memory.scatter(rows, buffer), "KV_MEMORY_INVALID");
    }
    for (const length of [8, 32]) {
      const { buffer } = new Uint8Array(16).fill(255);
      await expectError(
        () => memory.scatter(Float64Array.of(0, length), buffer),
        "KV_MEMORY_INVALID",
      );
    }
    expect(memory.bytes.every((byte) => byte === 0)).toBe(true);
  });

  test("memory cannot be closed while it is registered; afterwards it closes any number of times", async () => {
    const { memory, registration } = await fixture.side(4096, 1);
    expect(registration.memory).toBe(memory);
    expectThrown(() => memory.close(), "KV_MEMORY_IN_USE");
    expect(memory.bytes[5]).toBe(pattern(4096, 1)[5]);
    await fixture.waitFor(registration.close());
    await fixture.waitFor(registration.close());
    memory.close();
    memory.close();
  });

  test("closed memory and memory of another transport cannot be registered", async () => {
    const agent = await fixture.agent();
    const memory = fixture.memory(4096);
    memory.close();
    await expectError(() => agent.register(memory), "KV_MEMORY_INVALID");
    const foreign = { ...fixture.memory(4096), address: 4096, lengthBytes: 4096 } as typeof memory;
    await expectError(() => agent.register(foreign), "KV_MEMORY_INVALID");
    expect(agent.telemetry().registrations).toBe(0);
  });
}
