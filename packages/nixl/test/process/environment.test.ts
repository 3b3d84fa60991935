import { nixlTransport } from "@kv/nixl";
import { afterEach, describe, expect, test } from "vitest";
import { loadAddon } from "../../src/addon/load-addon.js";
import { FAKE_NIXL, fakeMissing } from "../support/fake-nixl.js";

describe.skipIf(fakeMissing)(`variables of the process (${fakeMissing ?? "fake found"})`, () => {
  afterEach(() => {
    for (const name of Object.keys(process.env)) {
      if (name.startsWith("FAKE_NIXL_") || name.startsWith("KV_TEST_")) delete process.env[name];
    }
  });

  test("are not set while an agent is being created, since its thread reads them then", async () => {
    await using first = nixlTransport({ library: FAKE_NIXL });
    await (await first.createAgent()).close();
    const addon = loadAddon();
    process.env.FAKE_NIXL_STALL_BACKEND = "1500";
    const creating = first.createAgent();
    await expect
      .poll(() => addon.prepareEnvironment([["KV_TEST_PROBE", `${Math.random()}`]]))
      .toBe(undefined);
    // What has its value already needs no write.
    expect(addon.prepareEnvironment([])).toEqual([]);
    const before = process.env.KV_TEST_PROBE;
    delete process.env.FAKE_NIXL_STALL_BACKEND;
    await using second = nixlTransport({ library: FAKE_NIXL, env: { KV_TEST_LATE: "yes" } });
    const created = second.createAgent();
    expect(addon.prepareEnvironment([["KV_TEST_PROBE", "other"]])).toBe(undefined);
    expect(process.env.KV_TEST_PROBE).toBe(before);
    expect(process.env.KV_TEST_LATE).toBe(undefined);
    await Promise.all([creating, created]);
    expect(process.env.KV_TEST_LATE).toBe("yes");
  });
});
