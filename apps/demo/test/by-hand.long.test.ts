// A long suite: starts each role by hand.

import { type ChildProcess, spawn } from "node:child_process";
import { cpSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { freePort } from "@kv/testing/http/listening";
import { someOf } from "@kv/testing/long-run";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterEach, describe, expect, it, onTestFinished } from "vitest";
import { complete } from "../src/run/completion-client.js";
import { libfabricAbsence } from "./support/libfabric-absence.js";
import { preparedRun } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";
import { ended, startNode } from "./support/run-demo.js";

const root = fileURLToPath(new URL("../../..", import.meta.url));

const running: ChildProcess[] = [];
afterEach(async () => {
  for (const child of running.splice(0)) {
    if (child.exitCode !== null || child.signalCode !== null) continue;
    const end = new Promise((resolve) => child.once("close", resolve));
    child.kill("SIGTERM");
    await end;
  }
});

/** Starts a command with an IPC channel, as `npm run demo` does. */
function start(args: readonly string[], env: Record<string, string> = {}) {
  const child = spawn(process.execPath, [builtProgram("demo"), ...args], {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ["ignore", "pipe", "pipe", "ipc"],
  });
  running.push(child);
  const output = { stdout: "", stderr: "" };
  child.stdout?.on("data", (piece) => (output.stdout += piece));
  child.stderr?.on("data", (piece) => (output.stderr += piece));
  return { child, output };
}

interface Ready {
  readonly url: string;
  readonly backend: string | null;
  readonly engine_ids: readonly string[];
  readonly config: Record<string, unknown>;
}

/** The line that a server prints when it is ready. */
async function ready({ child, output }: ReturnType<typeof start>): Promise<Ready> {
  await expect
    .poll(() => output.stdout.includes("\n") || child.exitCode !== null, { timeout: 60_000 })
    .toBe(true);
  const [line = ""] = output.stdout.split("\n");
  if (!line.startsWith("{")) throw new Error(`no ready line: ${output.stderr}`);
  expect(JSON.parse(line)).toMatchObject({ ready: true });
  return JSON.parse(line) as Ready;
}

it("a proxy that is started by hand shows its settings: its options, then those of --config", async () => {
  const [port, adminPort] = [await freePort(), await freePort()];
  const config = { prefillers: ["127.0.0.1:9"], mode: "pull", timeouts: { graceMs: 7 }, port: 1 };
  const options = "--prefill 127.0.0.1:1 --decode 127.0.0.1:2 127.0.0.1:3 --mode push";
  const line = `proxy ${options} --port ${port} --admin-port ${adminPort} --config`;
  const proxy = await ready(start([...line.split(" "), JSON.stringify(config)]));
  expect(proxy.url).toBe(`http://127.0.0.1:${port}`);
  expect(proxy.config).toEqual({
    prefillers: ["127.0.0.1:1"],
    decoders: ["127.0.0.1:2", "127.0.0.1:3"],
    mode: "push",
    admin: { port: adminPort },
    timeouts: { graceMs: 7 },
    port,
  });
});

const absence = await nixlAbsence();
const why = absence === undefined ? "" : ` (${absence})`;

describe.skipIf(absence !== undefined)(`servers that are started by hand${why}`, () => {
  // The configuration of the decode side in vllm-neuron's issue 26.
  const cuda = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cuda"}';

  const wrong: [string[], RegExp][] = [
    [
      ["decode", "--kv-transfer-config", cuda],
      /kv_buffer_device is "cuda"; platform cpu has cpu.* \[KV_[A-Z_]+\]\n {2}/,
    ],
    [["prefill", "--config", '{"blocksize":16}'], /blocksize.*KV_CONFIG_UNKNOWN_KEY/s],
    [["prefill", "--extra-config", "no"], /--extra-config is not JSON/],
    [["proxy", "--prefill", "127.0.0.1:1"], /KV_/],
  ];
  it.each(someOf(wrong, 4))("%j prints its error and ends", async (args, message) => {
    const { child, output } = start(args);
    const code = await new Promise((resolve) => child.once("close", resolve));
    expect(output.stderr).toMatch(message);
    expect(code).toBe(2);
  });

  it("kv-peer decode reads from a prefill server, and finds in its metrics that no block is leaked", async () => {
    const port = await freePort();
    // vLLM's configuration of its usage guide, as it stands, and its variable.
    const guide = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}';
    const prefill = await ready(
      start(["prefill", "--dp", "2", "--kv-transfer-config", guide], {
        VLLM_NIXL_SIDE_CHANNEL_PORT: String(port),
      }),
    );
    expect(prefill.engine_ids.map((id) => id.slice(-4))).toEqual(["_dp0", "_dp1"]);
    expect(prefill.config).toMatchObject({
      role: "prefill",
      dp: 2,
      sideChannelHost: "127.0.0.1",
      sideChannelPort: port,
      maxModelLen: 2048,
      kvTransferConfig: JSON.parse(guide) as object,
    });
    const line = `decode --prefill ${prefill.url} --requests 8 --prompt-tokens 40,100`;
    const args = [builtProgram("kv-peer"), ...line.split(" ")];
    const { code, stdout } = await ended(startNode(args, {}));
    expect(stdout).toMatch(/^blocks +0 in use before, 0 after the read notifications/m);
    expect(stdout).toMatch(/^leaks +0 blocks/m);
    expect(code).toBe(0);
  }, 60_000);
});

const noLibfabric = await libfabricAbsence();

it.skipIf(noLibfabric !== undefined)(
  `the configuration of vllm-neuron's issue 26 runs as it stands${noLibfabric === undefined ? "" : ` (${noLibfabric})`}`,
  async () => {
    const { prompt, answer } = await preparedRun();
    const issue =
      '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","kv_connector_extra_config":{"backends":["LIBFABRIC"]}}';
    const servers = [
      start(["prefill", "--platform", "neuron", "--kv-transfer-config", issue]),
      start(["decode", "--kv-transfer-config", issue]),
    ];
    const [prefill, decode] = await Promise.all(servers.map(ready));
    expect([prefill?.backend, decode?.backend]).toEqual(["LIBFABRIC", "LIBFABRIC"]);
    const proxy = await ready(
      start(["proxy", "--prefill", prefill?.url ?? "", "--decode", decode?.url ?? ""]),
    );
    const request = { url: proxy.url, requestId: "r", promptTokens: prompt, maxTokens: 16 };
    expect((await complete(request)).tokens).toEqual(answer);
  },
  120_000,
);

describe("npm run demo", () => {
  /** The script in a folder without dependencies: a set-up would fail there. */
  function bareCheckout(): string {
    const folder = scratchFolder(onTestFinished);
    mkdirSync(join(folder, "apps/demo/src"), { recursive: true });
    cpSync(join(root, "tools/setup"), join(folder, "tools/setup"), { recursive: true });
    cpSync(join(root, "package.json"), join(folder, "package.json"));
    cpSync(join(root, "apps/demo/src/options.json"), join(folder, "apps/demo/src/options.json"));
    return folder;
  }

  it.each([
    [
      ["--help"],
      0,
      /--prefill-block-size <n>.*\n[\s\S]*--admin-port <n>[\s\S]*Commands:\n +accuracy/,
    ],
    [["prefill", "-h"], 0, /npm run demo -- prefill \[options\][\s\S]*--kv-transfer-config <json>/],
    [["--prefil-tp", "2"], 2, /^kv-demo: unknown option '--prefil-tp'; npm run demo -- --help/],
    [["--prefill-tp", "17"], 2, /argument '17' is invalid. It must be a whole number from 1 to 16/],
    [["--transport=tcp"], 2, /Allowed choices are nixl, memory/],
    [["proxy", "--prefill"], 2, /'--prefill <url...>' argument missing/],
  ])("answers %j before the set-up", async (args, code, message) => {
    const script = join(bareCheckout(), "tools/setup/demo.mjs");
    const outcome = await ended(startNode([script, ...args], {}));
    expect(code === 0 ? outcome.stdout : outcome.stderr).toMatch(message);
    expect(outcome.code).toBe(code);
  });

  it.each([
    [["--backend", "libfabric"], {}, true],
    [[], { NIXL_BACKEND: "LIBFABRIC" }, true],
    [[], { NIXL_BACKEND: " ", VLLM_NIXL_BACKEND: "LIBFABRIC,UCX" }, true],
    [[], { NIXL_BACKEND: "UCX", VLLM_NIXL_BACKEND: "LIBFABRIC" }, false],
    [["--backend=UCX"], { NIXL_BACKEND: "LIBFABRIC" }, false],
    [["--transport", "memory"], { NIXL_BACKEND: "LIBFABRIC" }, false],
    [["prefill", "--extra-config", '{"backends": ["LIBFABRIC"]}'], {}, true],
    [["--extra-config", '{"backends":["UCX"]}'], { NIXL_BACKEND: "LIBFABRIC" }, false],
    [[], {}, false],
  ] as const)("fetches LIBFABRIC's libraries for %j with %o: %s", async (args, env, wanted) => {
    const { usesLibfabric } = (await import(join(root, "tools/setup/demo-arguments.mjs"))) as {
      usesLibfabric(args: readonly string[], env: Record<string, string>): boolean;
    };
    expect(usesLibfabric(args, env)).toBe(wanted);
  });
});
