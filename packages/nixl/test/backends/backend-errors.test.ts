import { copyFile, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { KvError, type Log, silentLog } from "@kv/interface";
import { describePlugins, findLibrary, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { libfabricMissing } from "../support/libfabric-available.js";
import { runChild } from "../support/run-child.js";

describe.skipIf(fakeMissing)(
  `a backend that is not available (${fakeMissing ?? "fake found"})`,
  () => {
    let folder = "";
    beforeEach(async () => {
      folder = await mkdtemp(join(tmpdir(), "kv-nixl-plugins-"));
      process.env.NIXL_PLUGIN_DIR = folder;
    });
    afterEach(async () => {
      delete process.env.NIXL_PLUGIN_DIR;
      delete process.env.NIXL_BACKEND;
      delete process.env.NIXL_PREFIX;
      await rm(folder, { recursive: true, force: true });
    });

    test("the error names the setting that selected it, every plugin found, what each lacks, and the remedy", async () => {
      await copyFile(FAKE_NIXL, join(folder, "libplugin_UCX.so"));
      await writeFile(join(folder, "libplugin_BROKEN.so"), "no library");
      process.env.NIXL_BACKEND = "ABSENT";
      const transport = nixlTransport({ library: FAKE_NIXL });
      const error: unknown = await transport.createAgent().catch((caught: unknown) => caught);
      expect(KvError.is(error, "KV_BACKEND_UNAVAILABLE")).toBe(true);
      const { message, hint } = error as KvError;
      expect(message).toContain("ABSENT, selected by NIXL_BACKEND");
      expect(message).toContain("UCX (loads)");
      expect(message).toContain("BROKEN (lacks ");
      expect(hint).toContain("ask for one of UCX");
      const broken = transport.createAgent({ backends: [{ name: "BROKEN" }] });
      await expect(broken).rejects.toThrow(/selected by the agent's backends, does not load/);
      await transport.close();
    });

    test("the error of a peer that NIXL refuses names the variables that may leave no route, with their values", async () => {
      process.env.UCX_NET_DEVICES = "lo";
      const transport = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
      try {
        const agent = await transport.createAgent();
        const metadata = await (await transport.createAgent()).localMetadata();
        process.env.FAKE_NIXL_STRAY_ERRORS = "1";
        const error: unknown = await agent.addRemote(metadata).catch((caught: unknown) => caught);
        expect(KvError.is(error, "KV_AGENT_METADATA_INVALID") && error.message).toMatch(
          /^NIXL refused .*here UCX_NET_DEVICES=lo may leave no route to it$/,
        );
      } finally {
        delete process.env.UCX_NET_DEVICES;
        delete process.env.FAKE_NIXL_STRAY_ERRORS;
        await transport.close();
      }
    });

    test("the selection is logged and counted with its source, with one warning for each overridden variable", async () => {
      process.env.NIXL_BACKEND = "LIBFABRIC";
      const lines: unknown[] = [];
      const counted: unknown[] = [];
      const note = (event: string, fields?: Record<string, unknown>) => lines.push([event, fields]);
      const log: Log = { ...silentLog, info: note, warn: note };
      const metrics = {
        count: (...args: unknown[]) => void counted.push(args),
        observe: () => {},
      };
      const transport = nixlTransport({ library: FAKE_NIXL, log, metrics });
      expect((await transport.createAgent()).backends).toEqual(["LIBFABRIC"]);
      await transport.createAgent({ backends: [{ name: "UCX" }] });
      await transport.createAgent({ backends: [{ name: "UCX" }] });
      const backends = lines.filter((line) => (line as [string])[0] === "nixl-backends");
      expect(backends).toMatchObject([
        ["nixl-backends", { backends: "LIBFABRIC", source: "NIXL_BACKEND" }],
        ["nixl-backends", { backends: "UCX", source: "the agent's backends" }],
      ]);
      const lost = lines.filter((line) => (line as [string])[0] === "nixl-variable-unused");
      expect(lost).toMatchObject([
        [
          "nixl-variable-unused",
          { name: "NIXL_BACKEND", value: "LIBFABRIC", won: "UCX from the agent's backends" },
        ],
      ]);
      expect(counted.at(-1)).toEqual([
        "kv_nixl_agents_created",
        1,
        { backends: "UCX", source: "the agent's backends" },
      ]);
      await transport.close();
    });

    test("one warning for an overridden variable that names a library", async () => {
      process.env.NIXL_PREFIX = "/nowhere";
      const lost: unknown[] = [];
      const log: Log = { ...silentLog, warn: (event, fields) => lost.push([event, fields]) };
      const transport = nixlTransport({ library: FAKE_NIXL, log });
      await transport.createAgent();
      await transport.createAgent();
      await transport.close();
      expect(lost).toMatchObject([
        [
          "nixl-variable-unused",
          { name: "NIXL_PREFIX", value: "/nowhere", won: `${FAKE_NIXL} from the option library` },
        ],
      ]);
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

describe.each<{
  backend: string;
  missing: string | undefined;
  variables: readonly Record<string, string>[];
}>([
  {
    backend: "UCX",
    missing: nixlMissing,
    variables: [{ UCX_TLS: "rc,ud" }, { UCX_TLS: "tcp", UCX_NET_DEVICES: "mlx5_0:1" }],
  },
  {
    backend: "LIBFABRIC",
    missing: libfabricMissing,
    variables: [{ NIXL_BACKEND: "LIBFABRIC", FI_PROVIDER: "efa" }],
  },
])("variables that leave $backend no route ($missing)", ({ missing, variables: each }) => {
  test.skipIf(missing).each(each)(
    "%o: the error names each variable with its value, and the hint says what to do",
    async (env) => {
      const { stdout } = await runChild("create-agent.ts", [], { env });
      const { code, message, hint } = JSON.parse(stdout.trim().split("\n").at(-1) ?? "") as Record<
        string,
        string
      >;
      expect(code).toBe("KV_BACKEND_UNAVAILABLE");
      const { NIXL_BACKEND: _, ...variables } = env as Record<string, string>;
      for (const [variable, value] of Object.entries(variables)) {
        expect(message).toContain(`${variable}=${value}`);
        expect(hint).toContain(variable);
      }
    },
  );
});
