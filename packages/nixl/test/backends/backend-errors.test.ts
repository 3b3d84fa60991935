import { copyFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { describePlugins, findLibrary, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { recordedLog } from "@kv/testing/recorded-log";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterEach, beforeEach, describe, expect, onTestFinished, test, vi } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";
import { refused } from "../support/refused.js";
import { runChild } from "../support/run-child.js";

describe.skipIf(fakeMissing)(
  `a backend that is not available (${fakeMissing ?? "fake found"})`,
  () => {
    let folder = "";
    beforeEach(() => {
      folder = scratchFolder(onTestFinished);
      vi.stubEnv("NIXL_PLUGIN_DIR", folder);
    });
    afterEach(() => void vi.unstubAllEnvs());

    test("the error names the setting that selected it, every plugin found, what each lacks, and the remedy", async () => {
      await copyFile(FAKE_NIXL, join(folder, "libplugin_UCX.so"));
      await writeFile(join(folder, "libplugin_BROKEN.so"), "no library");
      vi.stubEnv("NIXL_BACKEND", "ABSENT");
      await using transport = nixlTransport({ library: FAKE_NIXL });
      const code = "KV_BACKEND_UNAVAILABLE";
      const { message, hint } = await refused(transport.createAgent(), code);
      for (const part of ["ABSENT, selected by NIXL_BACKEND", "UCX (loads)", "BROKEN (lacks "])
        expect(message).toContain(part);
      expect(hint).toContain("ask for one of UCX");
      const broken = () => transport.createAgent({ backends: [{ name: "BROKEN" }] });
      expect((await refused(broken, code)).message).toContain(
        "selected by the agent's backends, does not load",
      );
    });

    test("the error of a peer that NIXL refuses names the variables that may leave no route, with their values", async () => {
      vi.stubEnv("UCX_NET_DEVICES", "lo");
      await using transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
      const agent = await transport.createAgent();
      const metadata = await (await transport.createAgent()).localMetadata();
      vi.stubEnv("FAKE_NIXL_STRAY_ERRORS", "1");
      const adds = () => agent.addRemote(metadata);
      expect((await refused(adds, "KV_AGENT_METADATA_INVALID")).message).toMatch(
        /^NIXL refused .*here UCX_NET_DEVICES=lo may leave no route to it$/,
      );
    });

    test("S5.2: the selection is logged and counted with its source, with one warning for each overridden variable", async () => {
      vi.stubEnv("NIXL_BACKEND", "LIBFABRIC");
      vi.stubEnv("NIXL_PREFIX", "/nowhere");
      const { log, logged } = recordedLog();
      const metrics = { count: vi.fn(), observe() {} };
      await using transport = nixlTransport({ library: FAKE_NIXL, log, metrics });
      expect((await transport.createAgent()).backends).toEqual(["LIBFABRIC"]);
      const source = "the user's key";
      const asked = { backends: [{ name: "UCX" }], backendsSetting: source };
      for (let agent = 0; agent < 2; agent++) await transport.createAgent(asked);
      expect(logged("nixl-backends")).toMatchObject([
        { backends: "LIBFABRIC", source: "NIXL_BACKEND" },
        { backends: "UCX", source },
      ]);
      const prefix = { value: "/nowhere", won: `${FAKE_NIXL} from the option library` };
      expect(logged("nixl-variable-unused")).toMatchObject([
        { name: "NIXL_PREFIX", ...prefix },
        { name: "NIXL_BACKEND", value: "LIBFABRIC", won: `UCX from ${source}` },
      ]);
      const counted = { backends: "UCX", source };
      expect(metrics.count).toHaveBeenLastCalledWith("kv_nixl_agents_created", 1, counted);
    });
  },
);

describe.skipIf(nixlMissing)(`plugins of the wheel (${nixlMissing ?? "found"})`, () => {
  test("UCX loads; for plugins that do not load, the missing libraries are named", async () => {
    const libraryPath = await findLibrary();
    // An empty cache, without installed dependencies.
    const environment = { ...process.env, XDG_CACHE_HOME: dirname(libraryPath) };
    const plugins = await describePlugins({ libraryPath, environment });
    expect(plugins.find(({ name }) => name === "UCX")).toMatchObject({ loads: true, missing: [] });
    for (const plugin of plugins) {
      expect(plugin.loads).toBe(plugin.missing.length === 0);
      expect(plugin.remedy === undefined).toBe(plugin.loads);
    }
  });
});

describe.each([
  {
    backend: "UCX",
    missing: nixlMissing,
    variables: [{ UCX_TLS: "rc,ud" }, { UCX_TLS: "tcp", UCX_NET_DEVICES: "mlx5_0:1" }],
  },
  { backend: "LIBFABRIC", missing: libfabricMissing, variables: [{ FI_PROVIDER: "efa" }] },
])("variables that leave $backend no route ($missing)", ({ backend, missing, variables }) => {
  test.skipIf(missing).each<Record<string, string>>(variables)(
    "%o: the error names each variable with its value, and the hint says what to do",
    async (env) => {
      const chosen = backend === "UCX" ? {} : { NIXL_BACKEND: backend };
      const { stdout } = await runChild("create-agent.ts", [], { env: { ...env, ...chosen } });
      const { code, message, hint } = JSON.parse(stdout.trim().split("\n").at(-1) ?? "");
      expect(code).toBe("KV_BACKEND_UNAVAILABLE");
      for (const [variable, value] of Object.entries(env)) {
        expect(message).toContain(`${variable}=${value}`);
        expect(hint).toContain(variable);
      }
    },
  );
});
