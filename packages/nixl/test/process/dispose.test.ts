import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe, expect, test } from "vitest";

describe.skipIf(fakeMissing)(`using declarations (${fakeMissing ?? "fake found"})`, () => {
  test("close memory, an agent and a transport at the end of their block", async () => {
    let closed = nixlTransport();
    let view: Uint8Array = new Uint8Array();
    {
      await using transport = nixlTransport({ library: FAKE_NIXL });
      await using agent = await transport.createAgent();
      using memory = transport.allocate(4096);
      memory.bytes.fill(1);
      await using _registration = await agent.register(memory);
      [closed, view] = [transport, memory.bytes];
      expect(agent.telemetry()).toMatchObject({ registrations: 1 });
    }
    // Empty; on Node 24, which cannot detach the buffer, zeros.
    expect(view[0] ?? 0).toBe(0);
    await expect(closed.createAgent()).rejects.toMatchObject({ code: "KV_TRANSPORT_CLOSED" });
  });
});
