import { describe, expect, it } from "vitest";
import { planInstances, planProxy } from "./cluster/cluster-plan.js";
import { createCommand, type DemoFlags } from "./command-line.js";

async function parsed(...args: string[]): Promise<DemoFlags> {
  let found: DemoFlags | undefined;
  const nothing = async () => {};
  const command = createCommand({
    demo: async (flags) => {
      found = flags;
    },
    instance: nothing,
    proxy: nothing,
  });
  command.exitOverride().configureOutput({ writeErr: () => {} });
  await command.parseAsync(["node", "kv-demo", ...args]);
  if (found === undefined) throw new Error("the demo was not run");
  return found;
}

const CLUSTER = { transport: "memory", cacheTokens: 1024 } as const;

describe("the flags of the demo", () => {
  it("select push, the order of its requests, and layerwise writes", async () => {
    const flags = await parsed("--connector", "push", "--push-legs", "prefill-first", "--push-layerwise");
    expect(flags).toMatchObject({ connector: "push", pushLegs: "prefill-first", pushLayerwise: true });
    const { prefills, decodes } = planInstances({ ...flags, ...CLUSTER });
    for (const { config } of [...prefills, ...decodes]) {
      expect(config.kvTransferConfig).toMatchObject({
        kv_connector: "push",
        kv_connector_extra_config: { push_layerwise: true },
      });
    }
    expect(planProxy([], [], flags)).toMatchObject({ mode: "push", pushLegs: "prefill-first" });
  });

  it("select pull by default, and the proxy's pull order for the connector auto", async () => {
    expect(planProxy([], [], await parsed()).mode).toBe("pull");
    expect(planProxy([], [], await parsed("--connector", "auto")).mode).toBe("pull");
    const { prefills } = planInstances({ ...(await parsed()), ...CLUSTER });
    expect(prefills[0]?.config.kvTransferConfig).toMatchObject({ kv_connector_extra_config: {} });
  });

  it("refuse an unknown connector or order", async () => {
    await expect(parsed("--connector", "pish")).rejects.toThrow(/not one of .*push.*auto/);
    await expect(parsed("--push-legs", "sideways")).rejects.toThrow(/at-once, prefill-first/);
  });
});
