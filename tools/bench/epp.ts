import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { type EnvoyOptions, envoyConfig } from "../envoy/envoy-config.js";
import { installEnvoy } from "../envoy/install-envoy.js";
import { containerNode } from "../release/registry.js";
import { cpuMs, firstLine, freePort, residentBytes } from "./child-processes.js";
import { besideRouter, type LoadGenerator, OTHER_CORE, ROUTER_CORE } from "./proxy-load.js";
import { alone, median, type Row, rowOf, spread } from "./report.js";

const ROUNDS = 15;
const ALONE_MS = 600;
const BUSY_MS = 2_000;
const CLIENTS = 32;
const REQUESTS = 100_000;
const WARM_UP = 5_000;

type Way = "direct" | "static" | "picked";
const WAYS: readonly Way[] = ["direct", "static", "picked"];

/**
 * Envoy with `kv-epp` against Envoy with a static cluster, and D without either. The picker has a
 * core of its own; Envoy, P, D and clients share the other one.
 */
export const epp = (
  only: readonly string[] = ["latency", "picks", "memory"],
): Promise<readonly Row[]> =>
  besideRouter(async ({ generator, decode, flags, start }) => {
    const folder = mkdtempSync(join(tmpdir(), "kv-bench-epp-"));
    const cli = fileURLToPath(new URL("../../packages/epp/dist/cli.js", import.meta.url));
    const env = { ...process.env, NODE_ENV: "production" };
    const picker = start(ROUTER_CORE, await containerNode(), [cli, ...flags], env);
    const pickerPort = Number(/ready 127\.0\.0\.1:(\d+)/.exec(await firstLine(picker))?.[1]);

    const envoy = async (way: Exclude<Way, "direct">) => {
      const port = await freePort();
      const config = configFor(way, { port, pickerPort, endpoints: [decode] });
      const file = join(folder, `${way}.json`);
      writeFileSync(file, JSON.stringify(config));
      const flags = [
        "-c",
        file,
        "--concurrency",
        "1",
        "--log-level",
        "error",
        "--disable-hot-restart",
      ];
      start(OTHER_CORE, await installEnvoy(), flags);
      return `http://127.0.0.1:${port}`;
    };
    try {
      const urls: Record<Way, string> = {
        direct: `http://${decode}`,
        static: await envoy("static"),
        picked: await envoy("picked"),
      };
      for (const way of WAYS) await warmedUp(generator, urls[way]);
      const pid = picker.pid ?? 0;
      return [
        ...(only.includes("latency") ? await addedLatency(generator, urls) : []),
        ...(only.includes("picks") ? [await picks(generator, urls.picked, pid)] : []),
        ...(only.includes("memory") ? [await memory(generator, urls.picked, pid)] : []),
      ];
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
    count += (await generator.busy(url, CLIENTS, BUSY_MS / 4)).tookMs.length;
}

async function addedLatency(
  generator: LoadGenerator,
  urls: Readonly<Record<Way, string>>,
): Promise<Row[]> {
  const p50: Record<Way, number[]> = { direct: [], static: [], picked: [] };
  for (let round = 0; round < ROUNDS; round += 1) {
    const order = round % 2 === 0 ? WAYS : [...WAYS].reverse();
    for (const way of order)
      p50[way].push(median((await generator.busy(urls[way], 1, ALONE_MS)).tookMs));
  }
  const added = (way: Way, over: Way) =>
    p50[way].map((value, round) => value - (p50[over][round] ?? Number.NaN));
  const over = added("picked", "static");
  const first =
    "one client, streamed, p50 of a round: added by kv-epp, over Envoy with a static cluster";
  const second = "the same: added by Envoy with a static cluster, over D without it";
  const [beside, none] = [spread(p50.static, "ms"), spread(p50.direct, "ms")];
  return [
    alone(first, spread(over, "ms"), "<= 2 ms", median(over) <= 2, beside, ROUNDS),
    alone(second, spread(added("static", "direct"), "ms"), "reported", undefined, none, ROUNDS),
  ];
}

/** Of the picker's processor time, as Envoy and the clients on the other core are the limit. */
async function picks(generator: LoadGenerator, url: string, pid: number): Promise<Row> {
  const perSecond: number[] = [];
  const rates: number[] = [];
  for (let round = 0; round < ROUNDS; round += 1) {
    const before = cpuMs(pid);
    const { tookMs, perSecond: rate } = await generator.busy(url, CLIENTS, BUSY_MS);
    perSecond.push(1000 / ((cpuMs(pid) - before) / tookMs.length));
    rates.push(rate);
  }
  const what = `${CLIENTS} clients: picks per second of the picker's processor time; theirs: requests per second through Envoy`;
  const isMet = median(perSecond) >= 1_000;
  return alone(what, spread(perSecond, "/s"), ">= 1000", isMet, spread(rates, "/s"), ROUNDS);
}

/**
 * The heap grows until its first full collections, so the first fifth of the requests does not
 * count.
 */
async function memory(generator: LoadGenerator, url: string, pid: number): Promise<Row> {
  const samples: { readonly at: number; readonly mebibytes: number }[] = [];
  for (let at = 0; at < REQUESTS; ) {
    at += (await generator.busy(url, CLIENTS, BUSY_MS / 4)).tookMs.length;
    samples.push({ at, mebibytes: residentBytes(pid) / 2 ** 20 });
  }
  const within = (from: number, to: number) =>
    samples
      .filter(({ at }) => at >= from * REQUESTS && at <= to * REQUESTS)
      .map(({ mebibytes }) => mebibytes);
  const [early, late] = [within(0.2, 0.4), within(0.8, 1.1)];
  const ratio = median(late) / median(early);
  const what = `${REQUESTS} requests: resident memory of the picker in the last fifth / in the second one`;
  return rowOf(what, [spread(late, "MiB"), spread(early, "MiB")], ratio, "<=", 1.1);
}
