// A long suite: processes with variables of all kinds.
import { fileURLToPath } from "node:url";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { bundled } from "@kv/testing/node-programs";
import { afterEach, describe, expect, test } from "vitest";
import { loadAddon } from "../../src/addon/load-addon.js";
import { run } from "../support/run-child.js";

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

describe.skipIf(nixlMissing)(
  `variables that UCX does not use (${nixlMissing ?? "NIXL found"})`,
  () => {
    const path = fileURLToPath(new URL("../children/create-agent.ts", import.meta.url));
    const others = Object.fromEntries(
      Object.entries(process.env).filter(([name]) => !name.startsWith("UCX_")),
    );

    test.each([
      [undefined, "64"],
      ["all", "64"],
      ["tcp,sm,self", "64"],
      ["^ib", "64"],
      ["tcp,self", undefined],
      ["^cma", undefined],
    ])(
      "with UCX_TLS=%s UCX_CMA_TX_QUOTA is %s, and UCX warns of nothing",
      async (transports, quota) => {
        const only = { ...others, ...(transports === undefined ? {} : { UCX_TLS: transports }) };
        const { stdout, stderr } = await run([await bundled(path)], {
          only: only as Record<string, string>,
        });
        expect(JSON.parse(stdout)).toMatchObject({ message: "undefined" });
        expect((JSON.parse(stdout) as { quota?: string }).quota).toBe(quota);
        expect(stderr).not.toContain("unused environment variable");
      },
    );
  },
);
