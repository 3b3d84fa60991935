// A long suite: starts every program with hostile names and values.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { runCommand } from "@kv/program";
import { sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { listening } from "@kv/testing/http/listening";
import { builtProgram } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

/**
 * What a terminal obeys: control characters but line break and tab, and characters that change the
 * direction of text.
 */
const OBEYED = /[^\n\t\P{Cc}]|\p{Bidi_Control}/u;
/** Sets a terminal's title, clears it, and turns text around. */
const HOSTILE = "\u001b]0;owned\u0007\u009b2J\u007f\u202e";
const SHOWN = "\\u001b]0;owned\\u0007\\u009b2J\\u007f\\u202e";

const folder = scratchFolder();

function file(name: string, content: unknown): string {
  const path = join(folder, name);
  mkdirSync(join(path, ".."), { recursive: true });
  writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
  return path;
}

test("only packages/program writes to the terminal", () => {
  const writing = sourceFiles(root, ["packages", "apps"]).filter(
    (path) =>
      /\/src\//.test(path) &&
      !/^packages\/testing\//.test(path) &&
      /(?<!#)\bprocess\.(stdout|stderr)\b|\bconsole\.|\bwriteSync\([12],/.test(
        readFileSync(join(root, path), "utf8"),
      ),
  );
  // runProgram listens for a reader that goes away.
  expect(writing).toEqual(["packages/program/src/print.ts", "packages/program/src/run-program.ts"]);
});

/** What a built program prints until its end. `words`: its name and arguments. */
async function printed(words: string | readonly string[], env: NodeJS.ProcessEnv = {}) {
  const [program = "", ...args] = typeof words === "string" ? words.split(" ") : words;
  const { stdout, stderr } = await runCommand(process.execPath, [builtProgram(program), ...args], {
    env: { ...process.env, ...env },
  });
  return { stdout, stderr, all: stdout + stderr };
}

/** The text is shown, and nothing of it is obeyed. */
function expectShown(output: string): void {
  expect(output).toContain(SHOWN);
  expect(OBEYED.exec(output)?.[0]).toBeUndefined();
}

describe("a hostile peer", () => {
  const said = {
    version: HOSTILE,
    data: [{ id: HOSTILE, root: HOSTILE }],
    error: { message: HOSTILE },
  };
  /** Stands for the other side of a benchmark. */
  const bench = createServer((socket) => {
    socket.on("error", () => {});
    socket.once("data", () =>
      socket.end(`${JSON.stringify({ error: { code: "KV_INTERNAL", message: HOSTILE } })}\n`),
    );
  });
  let [url, benchAddress] = ["", ""];
  beforeAll(async () => {
    /** Stands for a vLLM server. */
    const server = await startUpstream(({ path, method, response }) => {
      if (path === "/metrics") response.end(`vllm:x{model="${HOSTILE}"} 1\n`);
      else sendJson(response, said, method === "POST" ? 500 : 200);
    });
    url = server.url;
    benchAddress = `127.0.0.1:${await listening(bench)}`;
    return async () => {
      await server.close();
      bench.close();
    };
  });

  test.each<[string, () => string]>([
    ["kv-peer doctor", () => `--prefill ${url} --decode ${url} --no-bytes`],
    ["kv-peer decode", () => `--prefill ${url} --requests 1`],
    ["kv-peer record", () => `--prefill ${url} --to ${join(folder, "recording")}`],
    ["kv-peer watch", () => `--pair ${url},${url} --once`],
    ["kv-nixl bench", () => `--connect ${benchAddress}`],
  ])("%s shows what it says", async (command, args) => {
    expectShown((await printed(`${command} ${args()}`)).all);
  });

  test("--json says it exactly, in escapes", async () => {
    const { stdout, stderr } = await printed(`kv-peer doctor --prefill ${url} --no-bytes --json`);
    expectShown(stdout);
    expect(stderr).toBe("");
    const { checks } = JSON.parse(stdout) as { checks: { found: string }[] };
    expect(checks.some(({ found }) => found.includes(HOSTILE))).toBe(true);
  });
});

describe("a hostile file", () => {
  const model = JSON.parse(
    readFileSync(join(root, "packages/kv-plan/models/qwen3-0.6b.json"), "utf8"),
  ) as object;

  const modelFile = () => file(`${HOSTILE}.json`, model);
  test.each<[string, () => string[]]>([
    [
      "kv-peer diff",
      () => {
        const manifest = { version: 1, prefill: { url: [HOSTILE] }, [HOSTILE]: 1 };
        file("recording-1/manifest.json", manifest);
        return ["diff", join(folder, "recording-1", HOSTILE), join(folder, "recording-1")];
      },
    ],
    ["kv-plan --config", () => ["--tp", "2", "--tp", "1", "--config", modelFile()]],
    ["kv-plan --html", () => ["--tp", "2", "--html", "--config", modelFile()]],
    ["kv-plan --file", () => ["--file", file("pair.json", HOSTILE)]],
    ["kv-proxy", () => ["--config", file("proxy.json", { [HOSTILE]: HOSTILE })]],
    ["kv-epp", () => ["--config", file("epp.json", { [HOSTILE]: HOSTILE })]],
    ["demo", () => ["proxy", "--config", JSON.stringify({ [HOSTILE]: HOSTILE })]],
  ])("%s shows what it says", async (name, args) => {
    expectShown((await printed([name.split(" ")[0] ?? "", ...args()])).all);
  });

  test("a page on stdout is the page in a file", async () => {
    const command = `kv-plan --config ${file("model.json", model)} --tp 2 --html`;
    const page = join(folder, "page.html");
    await printed(`${command} --out ${page}`);
    expect((await printed(command)).stdout).toBe(readFileSync(page, "utf8"));
  });
});

test.each([
  ["kv-nixl where", "KV_NIXL_LIBRARY"],
  ["kv-nixl doctor --no-pair", "KV_NIXL_LIBRARY"],
  ["kv-neuron doctor --no-init", "KV_NRT_LIBRARY"],
  ["kv-proxy --prefill p:1 --decode d:1", "OTEL_EXPORTER_OTLP_ENDPOINT"],
  ["kv-epp --prefill p:1 --decode d:1", "OTEL_EXPORTER_OTLP_ENDPOINT"],
  ["demo proxy", "OTEL_EXPORTER_OTLP_ENDPOINT"],
])("%s shows a hostile %s", async (command, variable) => {
  expectShown((await printed(command, { [variable]: `/nowhere/${HOSTILE}` })).all);
});

test("kv-proxy: the log shows what a client and an instance say", async () => {
  const instance = await startUpstream(({ method, response }) =>
    sendJson(response, { error: { message: HOSTILE } }, method === "POST" ? 500 : 200),
  );
  const at = new URL(instance.url).host;
  const args = `--prefill ${at} --decode ${at} --port 0 --pairing off --log-level debug`;
  const child = spawn(process.execPath, [builtProgram("kv-proxy"), ...args.split(" ")], {
    stdio: ["ignore", "pipe", "pipe"],
  });
  const log: Buffer[] = [];
  child.stderr.on("data", (chunk: Buffer) => log.push(chunk));
  const [line] = (await once(child.stdout, "data")) as [Buffer];
  const [url = ""] = /http:\S+/.exec(String(line)) ?? [];
  const body = JSON.stringify({ model: HOSTILE, prompt: HOSTILE, max_tokens: 1 });
  const headers = { "content-type": "application/json" };
  await (await fetch(`${url}/v1/completions`, { method: "POST", headers, body })).text();
  child.kill("SIGTERM");
  await once(child, "close");
  await instance.close();
  const text = Buffer.concat(log).toString();
  expect(OBEYED.exec(text)?.[0]).toBeUndefined();
  expect(text).toContain("/v1/completions");
});
