import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { type EnvoyOptions, envoyConfig } from "../envoy/envoy-config.js";
import { installEnvoy } from "../envoy/install-envoy.js";
import { containerNode } from "../release/registry.js";
import { cpuMs, freePort, residentBytes } from "./child-processes.js";
import { alone, median, type Row, rowOf, spread } from "./report.js";
import { besideRouter, type LoadGenerator, OTHER_CORE, ROUTER_CORE } from "./router-load.js";
import type { Run } from "./run.js";

const ROUNDS = 15;
const ALONE_MS = 600;
const BUSY_MS = 2_000;
const CLIENTS = 32;
const REQUESTS = 100_000;
const WARM_UP = 5_000;
const CLI = fileURLToPath(new URL("../../packages/epp/dist/cli.js", import.meta.url));

type Way = "direct" | "static" | "picked";
const WAYS: readonly Way[] = ["direct", "static", "picked"];

interface Measured {
  readonly generator: LoadGenerator;
  readonly urls: Readonly<Record<Way, string>>;
  readonly pid: number;
  readonly run: Run;
}

/**
 * Envoy with `kv-epp` against Envoy with a static cluster, and D without either. The picker has a
 * core of its own; Envoy, P, D and clients share the other one.
 */
export const epp = (run: Run): Promise<readonly Row[]> =>
  besideRouter(OTHER_CORE, async ({ generator, decode, flags, start, startOurs }) => {
    const folder = mkdtempSync(join(tmpdir(), "kv-bench-epp-"));
    const picker = await startOurs(ROUTER_CORE, await containerNode(), [CLI, ...flags]);
    const pickerPort = Number(new URL(picker.url).port);
    const envoy = async (way: Exclude<Way, "direct">) => {
      const port = await freePort();
      const config = configFor(way, { port, pickerPort, endpoints: [decode] });
      const file = join(folder, `${way}.json`);
      writeFileSync(file, JSON.stringify(config));
      const quiet = ["--log-level", "error", "--disable-hot-restart"];
      start(OTHER_CORE, await installEnvoy(), ["-c", file, "--concurrency", "1", ...quiet]);
      return `http://127.0.0.1:${port}`;
    };
    try {
      const urls: Record<Way, string> = {
        direct: `http://${decode}`,
        static: await envoy("static"),
        picked: await envoy("picked"),
      };
      for (const way of WAYS) await warmedUp(generator, urls[way]);
      const parts = { latency: addedLatency, picks, memory };
      return await run.parts(parts, { generator, urls, pid: picker.pid, run });
    } finally {
      rmSync(folder, { recursive: true });
    }
  });

/**
 * The configuration for one way: without the picker's filter for `static`. Health checks of the
 * picker, which ask five times a second and are for `FailOpen`, are left out.
 */
function configFor(way: Exclude<Way, "direct">, options: Omit<EnvoyOptions, "failOpen">): object {
  const config = envoyConfig({ ...options, failOpen: false });
  const { static_resources: resources } = config;
  const [picker, decode] = resources.clusters.map(({ health_checks: _, ...cluster }) => cluster);
  if (way === "picked")
    return { ...config, static_resources: { ...resources, clusters: [picker, decode] } };
  const { load_balancing_policy: _, ...cluster } = decode ?? {};
  const [listener] = resources.listeners;
  const [filter] = listener?.filter_chains[0]?.filters ?? [];
  const http = filter?.typed_config as unknown as {
    readonly http_filters: readonly { readonly name: string }[];
  };
  const http_filters = http.http_filters.filter(({ name }) => !name.endsWith("ext_proc"));
  const filters = [{ ...filter, typed_config: { ...http, http_filters } }];
  const listeners = [{ ...listener, filter_chains: [{ filters }] }];
  return { ...config, static_resources: { listeners, clusters: [cluster] } };
}

/** Waits until a request is answered, and then until the code is compiled. */
async function warmedUp(generator: LoadGenerator, url: string): Promise<void> {
  await generator.answered(url);
  for (let count = 0; count < WARM_UP; )
    count += (await generator.load(url, CLIENTS, BUSY_MS / 4)).tookMs.length;
}

async function addedLatency({ generator, urls, run }: Measured): Promise<Row[]> {
  const p50: Record<Way, number[]> = { direct: [], static: [], picked: [] };
  const rounds = run.rounds(ROUNDS);
  for (let round = 0; round < rounds; round += 1)
    for (const way of round % 2 === 0 ? WAYS : [...WAYS].reverse())
      p50[way].push(median((await generator.load(urls[way], 1, ALONE_MS)).tookMs));
  const added = (way: Way, over: Way) =>
    p50[way].map((value, round) => value - (p50[over][round] ?? Number.NaN));
  const over = added("picked", "static");
  const first =
    "one client, streamed, p50 of a round: added by kv-epp, over Envoy with a static cluster";
  const second = "the same: added by Envoy with a static cluster, over D without it";
  const [beside, none] = [spread(p50.static, "ms"), spread(p50.direct, "ms")];
  return [
    alone(first, spread(over, "ms"), "<= 2 ms", median(over) <= 2, beside, rounds),
    alone(second, spread(added("static", "direct"), "ms"), "reported", undefined, none, rounds),
  ];
}

/** Of the picker's processor time, as Envoy and the clients on the other core are the limit. */
async function picks({ generator, urls, pid, run }: Measured): Promise<Row[]> {
  const perSecond: number[] = [];
  const rates: number[] = [];
  for (let round = 0; round < run.rounds(ROUNDS); round += 1) {
    const before = cpuMs(pid);
    const { tookMs, perSecond: rate } = await generator.load(urls.picked, CLIENTS, BUSY_MS);
    perSecond.push((1000 * tookMs.length) / (cpuMs(pid) - before));
    rates.push(rate);
  }
  const what = `${CLIENTS} clients: picks per second of the picker's processor time; theirs: requests per second through Envoy`;
  const isMet = median(perSecond) >= 1_000;
  const shown = spread(perSecond, "/s");
  return [alone(what, shown, ">= 1000", isMet, spread(rates, "/s"), rates.length)];
}

/**
 * The heap grows until its first full collections, so the first fifth of the requests does not
 * count.
 */
async function memory({ generator, urls, pid, run }: Measured): Promise<Row[]> {
  const requests = run.short ? REQUESTS / 10 : REQUESTS;
  const samples: { readonly at: number; readonly mebibytes: number }[] = [];
  for (let at = 0; at < requests; ) {
    at += (await generator.load(urls.picked, CLIENTS, BUSY_MS / 4)).tookMs.length;
    samples.push({ at, mebibytes: residentBytes(pid) / 2 ** 20 });
  }
  const within = (from: number, to: number) =>
    samples
      .filter(({ at }) => at >= from * requests && at <= to * requests)
      .map(({ mebibytes }) => mebibytes);
  const [early, late] = [within(0.2, 0.4), within(0.8, 1.1)];
  const what = `${requests} requests: resident memory of the picker in the last fifth / in the second one`;
  const shown = [spread(late, "MiB"), spread(early, "MiB")] as const;
  return [rowOf(what, shown, median(late) / median(early), "<=", 1.1)];
}
