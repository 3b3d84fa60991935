import { describe, expect, it } from "vitest";
import { planInstances, planPicker, planProxy, planSidecar } from "./cluster/cluster-plan.js";
import { createCommand, type DemoFlags } from "./command-line.js";
import { instanceSettings } from "./processes/roles.js";

async function parsed(...args: string[]): Promise<DemoFlags> {
  let found: DemoFlags | undefined;
  const nothing = async () => {};
  const command = createCommand({
    demo: async (flags) => {
      found = flags;
    },
    accuracy: nothing,
    instance: nothing,
    proxy: nothing,
    picker: nothing,
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

  it("give the proxy the side channels of the instances", () => {
    const sideChannel = { host: "127.0.0.1", port: 5600 };
    const running = [{ url: "http://127.0.0.1:1", sideChannel }];
    expect(planProxy(running, running, { connector: "pull" })).toMatchObject({
      prefillers: [{ url: "http://127.0.0.1:1", kv: sideChannel }],
      decoders: [{ url: "http://127.0.0.1:1", kv: sideChannel }],
    });
  });

  it("select pull by default, and the proxy's pull order for the connector auto", async () => {
    expect(planProxy([], [], await parsed()).mode).toBe("pull");
    expect(planProxy([], [], await parsed("--connector", "auto")).mode).toBe("pull");
    const { prefills } = planInstances({ ...(await parsed()), ...CLUSTER });
    expect(prefills[0]?.config.kvTransferConfig).toMatchObject({ kv_connector_extra_config: {} });
  });

  it("give every instance the modules, which take the place of what is built in", async () => {
    const modules = ["--transport-module", "t", "--platform-module", "p", "--cache-kind-module", "c"];
    const flags = await parsed(...modules);
    const { prefills, decodes } = planInstances({ ...flags, ...CLUSTER });
    for (const { config } of [...prefills, ...decodes]) {
      expect(config).toMatchObject({ transportModule: "t", platformModule: "p", cacheKindModule: "c" });
    }
    await expect(parsed("--transport-module", "t", "--backend", "UCX")).rejects.toThrow(/takes the place of/);
    await expect(parsed("--platform-module", "p", "--decode-platform", "neuron")).rejects.toThrow(
      /takes the place of/,
    );
  });

  it("add --extra-config to every instance's configuration, and give the proxy its admin port", async () => {
    const flags = await parsed("--extra-config", '{"engine_ttl": 5}', "--admin-port", "9090");
    const { prefills, decodes } = planInstances({ ...flags, ...CLUSTER });
    for (const { config } of [...prefills, ...decodes]) {
      expect(config.kvTransferConfig).toMatchObject({ kv_connector_extra_config: { engine_ttl: 5 } });
    }
    expect(planProxy([], [], flags).admin).toEqual({ port: 9090 });
    await expect(parsed("--extra-config", "[]")).rejects.toThrow("--extra-config is [], not a JSON object");
  });

  it("put Envoy in front, without the proxy's admin routes", async () => {
    expect((await parsed()).front).toBe("proxy");
    expect((await parsed("--front", "envoy")).front).toBe("envoy");
    await expect(parsed("--front", "nginx")).rejects.toThrow(
      "'nginx' is invalid. Allowed choices are proxy, envoy",
    );
    await expect(parsed("--front", "envoy", "--admin-port", "9090")).rejects.toThrow(
      /--admin-port is the proxy's/,
    );
  });

  it("pair the sidecars at the picker by the side channels of their decode instances", () => {
    const running = (port: number) => ({
      url: `http://127.0.0.1:${port}`,
      sideChannel: { host: "127.0.0.1", port: port + 1000 },
    });
    expect(
      planSidecar([running(1)], running(2), { connector: "push", pushLegs: "prefill-first" }),
    ).toMatchObject({
      mode: "push",
      pushLegs: "prefill-first",
      decoders: [{ url: "http://127.0.0.1:2", kv: { port: 1002 } }],
      sidecar: { allow: ["127.0.0.1"], kv: { port: 1001 } },
    });
    expect(planPicker([running(1)], [running(2)], [{ url: "http://127.0.0.1:3" }])).toMatchObject({
      prefillers: [{ url: "http://127.0.0.1:1", kv: { port: 1001 } }],
      decoders: [{ url: "http://127.0.0.1:3", kv: { port: 1002 } }],
    });
  });

  it("refuse an unknown connector or order", async () => {
    await expect(parsed("--connector", "pish")).rejects.toThrow(/not one of .*push.*auto/);
    await expect(parsed("--push-legs", "sideways")).rejects.toThrow(/at-once, prefill-first/);
  });
});

describe("the settings of a server that is started by hand", () => {
  const flags = { logLevel: "info" } as const;

  it("are those of its role by default", () => {
    expect(instanceSettings("prefill", flags)).toEqual({
      role: "prefill",
      kvTransferConfig: { kv_connector: "NixlConnector", kv_role: "kv_producer" },
    });
    expect(instanceSettings("decode", { ...flags, port: 8201 })).toMatchObject({
      role: "decode",
      port: 8201,
      kvTransferConfig: { kv_role: "kv_consumer" },
    });
  });

  it("are those of --config, and options come before them", () => {
    const config =
      '{"role":"both","port":1,"tp":2,"kvTransferConfig":{"kv_connector":"push","kv_role":"kv_both"}}';
    expect(instanceSettings(undefined, { ...flags, config, port: 2 })).toMatchObject({
      role: "both",
      port: 2,
      tp: 2,
      kvTransferConfig: { kv_connector: "push" },
    });
    const extraConfig = '{"engine_ttl": 5}';
    const kvTransferConfig =
      '{"kv_connector":"x","kv_role":"kv_both","kv_connector_extra_config":{"backends":["UCX"]}}';
    expect(instanceSettings(undefined, { ...flags, config, kvTransferConfig, extraConfig })).toMatchObject({
      kvTransferConfig: {
        kv_connector: "x",
        kv_connector_extra_config: { backends: ["UCX"], engine_ttl: 5 },
      },
    });
  });
});
