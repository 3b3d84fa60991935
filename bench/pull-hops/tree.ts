import { type ChildProcess, spawn } from "node:child_process";
import { planInstances, planProxy } from "../../apps/demo/src/cluster/cluster-plan.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { BLOCK_TOKENS, FORWARD_MS_PER_512, KEEP_FREED_MEMORY, SIMULATED } from "../push-vs-pull/workload.js";

const CACHE_TOKENS = 24_576;
/** Prompts before the measurement. V8 compiles the code of a request after some hundreds of them; until then a pull takes 3 to 4 ms longer. */
const WARM_PROMPTS = 1500;
const READY_WITHIN_MS = 120_000;

/** A pull deployment over NIXL of a checkout: the proxy, P and D, each in its own process with that checkout's sources. */
export interface TreeDeployment {
  /** Time to the first token of one request of a prompt that no cache has, in ms. `id` is in the request's id. */
  ttftMs(inputTokens: number, id: string): Promise<number>;
  close(): Promise<void>;
}

/** `traceFile`: the processes write there when HTTP messages pass, and their spans to the file with ".spans" added to its name. */
export async function openTree(folder: string, traceFile?: string): Promise<TreeDeployment> {
  const children: ChildProcess[] = [];
  const start = async (role: string, config: object): Promise<string> => {
    const preload = traceFile === undefined ? [] : ["--import", new URL("trace.mjs", import.meta.url).href];
    const spans = traceFile === undefined ? [] : ["--trace", `${traceFile}.spans`];
    const args = [...preload, "--import", "tsx", "apps/demo/src/main.ts", role, "--log-level", "error"];
    const child = spawn(process.execPath, [...args, ...spans, "--config", JSON.stringify(config)], {
      cwd: folder,
      env: { ...process.env, ...KEEP_FREED_MEMORY, KV_TRACE_FILE: traceFile },
      stdio: ["ignore", "pipe", "inherit"],
    });
    children.push(child);
    return await readyUrl(child, `${role} of ${folder}`);
  };
  const close = async () => {
    for (const child of children.splice(0)) {
      if (child.exitCode !== null || child.signalCode !== null) continue;
      const ended = new Promise((resolve) => child.once("close", resolve));
      child.kill("SIGTERM");
      await ended;
    }
  };
  try {
    const options = {
      transport: "nixl",
      connector: "NixlConnector",
      ...{ prefills: 1, decodes: 1, prefillTp: 1, decodeTp: 1 },
      ...{ prefillBlockSize: BLOCK_TOKENS, decodeBlockSize: BLOCK_TOKENS, cacheTokens: CACHE_TOKENS },
      instance: {
        simulate: { ...SIMULATED, forwardMsPer512Tokens: FORWARD_MS_PER_512 },
        digests: false,
      },
      prefillInstance: { prefixCaching: false },
    } as const;
    const { prefills, decodes } = planInstances(options);
    const urls = await Promise.all(
      [...prefills, ...decodes].map(({ config }) => start("instance", { ...config, sideChannelPort: 0 })),
    );
    const [prefill = [], decode = []] = [urls.slice(0, 1), urls.slice(1)].map((of) =>
      of.map((url) => ({ url })),
    );
    const url = await start("proxy", planProxy(prefill, decode, options));
    let made = 0;
    const ttftMs = async (inputTokens: number, id: string) => {
      made += 1;
      const promptTokens = Array.from(
        { length: inputTokens + 1 },
        (_, i) => 3 + ((made * 7919 + i * 31 + ((made * i) % 13)) % 1000),
      );
      return (await complete({ url, requestId: `${id}-${made}`, promptTokens, maxTokens: 2 })).ttftMs;
    };
    for (let i = 0; i < WARM_PROMPTS; i++) await ttftMs(512, "warm");
    return { ttftMs, close };
  } catch (error) {
    await close();
    throw error;
  }
}

function readyUrl(child: ChildProcess, name: string): Promise<string> {
  return new Promise((resolve, reject) => {
    let text = "";
    const timer = setTimeout(() => reject(new Error(`${name} is not ready`)), READY_WITHIN_MS);
    child.once("close", () => reject(new Error(`${name} ended before it was ready`)));
    child.stdout?.on("data", (piece) => {
      text += piece;
      const line = text.split("\n").find((each) => each.startsWith("{"));
      if (line === undefined || !text.includes("\n")) return;
      clearTimeout(timer);
      resolve((JSON.parse(line) as { url: string }).url);
    });
  });
}
