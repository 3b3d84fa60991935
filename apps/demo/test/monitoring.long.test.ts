// A long suite: waits until Prometheus has scraped and no alert has fired.

import { execFileSync, type SpawnSyncReturns, spawn } from "node:child_process";
import { once } from "node:events";
import { cpSync, existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { jsonLog } from "@kv/fleet/front-end";
import { createProxy } from "@kv/proxy";
import { freePort } from "@kv/testing/http/listening";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { withMade } from "../../../tools/docs/page-parts.js";
import { type Cluster, startCluster } from "../src/cluster/cluster.js";
import { complete } from "../src/run/completion-client.js";
import { PAIR } from "./support/matrix.js";

// The dashboard and the alert rules that @kv/proxy ships, against what a pair and its proxy really
// export.
const monitoring = fileURLToPath(
  new URL("../../../packages/proxy/deploy/monitoring/", import.meta.url),
);
const read = (name: string) => readFileSync(join(monitoring, name), "utf8");

interface Dashboard {
  readonly panels: readonly {
    readonly title: string;
    readonly description?: string;
    readonly targets: readonly { readonly expr: string }[];
  }[];
  readonly templating: {
    readonly list: readonly { readonly query: string | { readonly query: string } }[];
  };
}
const dashboard = JSON.parse(read("dashboard.json")) as Dashboard;
const panelQueries = dashboard.panels.flatMap(({ title, targets }) =>
  targets.map(({ expr }) => ({ title, expr })),
);
const variableQueries = dashboard.templating.list.map(({ query }) =>
  typeof query === "string" ? query : query.query,
);

/**
 * The metrics that an expression of PromQL names; those of this project and of vLLM have a prefix.
 */
const metricsIn = (text: string) => new Set(text.match(/\b(kv_\w+|vllm:\w+)/g) ?? []);

const log = jsonLog("error", process.stderr);
let cluster: Cluster;
let proxy: ReturnType<typeof createProxy>;
let targets: { readonly proxy: string; readonly engines: readonly string[] };

beforeAll(async () => {
  // D keeps the blocks of ended turns, which the dashboard shows.
  const pair = { ...PAIR, extraConfig: { bidirectional_kv_xfer: true } };
  cluster = await startCluster(pair, { log, logLevel: "error" });
  const [prefillers, decoders] = [cluster.prefills, cluster.decodes].map((each) =>
    each.map(({ url }) => url),
  );
  proxy = createProxy({
    prefillers,
    decoders,
    log,
    admin: { port: 0 },
    limits: { bodyLengthBytes: 10_000 },
    disaggregateAbove: 8,
    readback: {},
  });
  const { url, adminUrl = "" } = await proxy.listen({ port: 0 });
  targets = { proxy: adminUrl, engines: [...(prefillers ?? []), ...(decoders ?? [])] };
  const prompt = (length: number) => Array.from({ length }, (_, at) => 3 + (at % 200));
  for (const length of [40, 100, 200])
    await complete({
      url,
      requestId: `length-${length}`,
      promptTokens: prompt(length),
      maxTokens: 4,
    });
  const tooLong = fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ prompt: "x".repeat(20_000) }),
  });
  expect((await tooLong).status).toBe(413);
}, 120_000);

afterAll(async () => {
  await proxy.close();
  await cluster.close();
});

async function exportedBy(url: string) {
  const text = await (await fetch(`${url}/metrics`)).text();
  const types = Array.from(text.matchAll(/^# TYPE (\S+) (\S+)$/gm), ([, name = "", type = ""]) => ({
    name,
    type,
  }));
  const samples = new Set(Array.from(text.matchAll(/^([\w:]+)(?=[{ ])/gm), ([name]) => name));
  const labels = new Set(Array.from(text.matchAll(/[{,](\w+)="/g), ([, label = ""]) => label));
  return { text, types, samples, labels };
}

async function exported() {
  return await Promise.all([targets.proxy, ...targets.engines].map(exportedBy));
}

test("each metric of the dashboard and of the alert rules is exported by a run", async () => {
  // A gauge without a sample now, such as that of unpaired servers, has its type on the page.
  const samples = new Set(
    (await exported()).flatMap((page) => [...page.samples, ...page.types.map(({ name }) => name)]),
  );
  const alerts = Array.from(
    read("alerts.yaml").matchAll(/^ {8}expr: (?:\|\n((?: {10}.*\n)+)|(.*))/gm),
    (found) => found[0],
  );
  expect(alerts.length).toBeGreaterThan(5);
  const named = [...panelQueries.map(({ expr }) => expr), ...variableQueries, ...alerts].flatMap(
    (text) => [...metricsIn(text)],
  );
  expect(named.length).toBeGreaterThan(20);
  expect(named.filter((name) => !samples.has(name))).toEqual([]);
});

test("first-contact.md: each panel of the dashboard says what it shows", () => {
  const silent = dashboard.panels.filter(({ description = "" }) => description.length < 20);
  expect(silent.map(({ title }) => title)).toEqual([]);
});

test("docs/metrics.md has each exported metric", async () => {
  const rows = new Map<string, string[]>();
  for (const { text, types } of await exported())
    for (const { name, type } of types) {
      const help = new RegExp(`^# HELP ${name} (.*)$`, "m").exec(text)?.[1] ?? "";
      rows.set(name, [`\`${name}\``, type, help]);
    }
  const table = [["metric", "type", "meaning"], ...[...rows].toSorted().map(([, row]) => row)];
  const page = new URL("../../../docs/metrics.md", import.meta.url);
  await expect(withMade(readFileSync(page, "utf8"), "metrics", table)).toMatchFileSnapshot(
    fileURLToPath(page),
  );
});

test("each exported metric is on the dashboard, has a help text, base units and no label of Prometheus' own", async () => {
  const shown = metricsIn(panelQueries.map(({ expr }) => expr).join("\n"));
  for (const { text, types, labels } of await exported()) {
    expect(types.length).toBeGreaterThan(3);
    for (const { name, type } of types) {
      const series =
        type === "histogram"
          ? ["_bucket", "_sum", "_count"].map((suffix) => name + suffix)
          : [name];
      expect(
        series.some((each) => shown.has(each)),
        `${name} on the dashboard`,
      ).toBe(true);
      expect(text).toMatch(new RegExp(`^# HELP ${name} \\S+`, "m"));
      expect(name).not.toMatch(/_(ms|millis|milliseconds|us|kb|mb|mib)(_|$)/);
      expect(name.endsWith("_total"), name).toBe(type === "counter");
    }
    for (const label of ["instance", "job"]) expect(labels).not.toContain(label);
  }
});

/** A program of Prometheus; undefined where it is missing. With CI=true it must be there. */
function findProgram(name: string): string | undefined {
  const folders = (process.env.PATH ?? "").split(":");
  return folders.map((folder) => join(folder, name)).find((path) => existsSync(path));
}
const promtool = findProgram("promtool");
const prometheus = findProgram("prometheus");
const missing =
  promtool === undefined || prometheus === undefined
    ? "missing: apt-get install prometheus"
    : undefined;
const isSkipped = missing !== undefined && process.env.CI !== "true";

describe.skipIf(isSkipped)(`Prometheus (${missing ?? "found"})`, () => {
  const work = scratchFolder();
  beforeAll(() => {
    cpSync(monitoring, work, { recursive: true });
  });

  /** Runs promtool; an error has its output. */
  function check(...args: string[]): string {
    try {
      return execFileSync(promtool ?? "promtool", args, {
        cwd: work,
        encoding: "utf8",
        stdio: "pipe",
      });
    } catch (error) {
      const { stdout, stderr } = error as SpawnSyncReturns<string>;
      throw new Error(`promtool ${args.join(" ")}: ${stdout}${stderr}`);
    }
  }

  test("promtool accepts the rules and the configuration, and each alert fires on its series", () => {
    expect(check("check", "config", "prometheus.yaml")).toContain("7 rules found");
    expect(check("test", "rules", "alerts.test.yaml")).toContain("SUCCESS");
    const rules = read("alerts.yaml").match(/- alert: (\w+)/g) ?? [];
    for (const rule of rules)
      expect(read("alerts.test.yaml")).toContain(rule.replace("- alert: ", "alertname: "));
  });

  test("a rule that is changed to never fire fails its test", () => {
    writeFileSync(join(work, "alerts.yaml"), read("alerts.yaml").replaceAll("> 0\n", "> 1e9\n"));
    expect(() => check("test", "rules", "alerts.test.yaml")).toThrow("KvReadAfterExpiry");
    cpSync(join(monitoring, "alerts.yaml"), join(work, "alerts.yaml"));
  });

  test("a real Prometheus scrapes a proxy and two engines, each panel has data, and no alert fires", {
    timeout: 120_000,
  }, async () => {
    const address = `127.0.0.1:${await freePort()}`;
    const hosts = (urls: readonly string[]) => JSON.stringify(urls.map((url) => new URL(url).host));
    const config = read("prometheus.yaml")
      .replace("scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s")
      .replace('["127.0.0.1:9090"]', hosts([targets.proxy]))
      .replace('["127.0.0.1:8100", "127.0.0.1:8200"]', hosts(targets.engines));
    writeFileSync(join(work, "run.yaml"), config);
    const args = [
      "--config.file=run.yaml",
      "--storage.tsdb.path=data",
      `--web.listen-address=${address}`,
    ];
    const server = spawn(prometheus ?? "prometheus", args, { cwd: work, stdio: "ignore" });
    const ended = once(server, "close");
    const ask = async (path: string) => {
      const answer = await fetch(`http://${address}/api/v1/${path}`);
      return (await answer.json()) as {
        status: string;
        error?: string;
        data: { result: unknown[]; alerts: unknown[] };
      };
    };
    const query = (expr: string) => ask(`query?query=${encodeURIComponent(expr)}`);
    try {
      // A rate needs two scrapes of each target.
      const scraped = () => query("count_over_time(up[1m]) > 2 and up == 1");
      const targetsScraped = async () => (await scraped().catch(() => undefined))?.data.result;
      await expect
        .poll(targetsScraped, { timeout: 60_000 })
        .toHaveLength(1 + targets.engines.length);
      for (const { title, expr } of panelQueries) {
        const filled = expr
          .replaceAll("$__rate_interval", "1m")
          .replaceAll(/\$(proxy|engine)/g, ".*");
        const { status, error, data } = await query(filled);
        expect({ title, status, error }).toEqual({ title, status: "success", error: undefined });
        expect(data.result.length, `${title}: ${filled}`).toBeGreaterThan(0);
      }
      expect((await query("ALERTS")).data.result).toEqual([]);
      expect((await ask("rules")).status).toBe("success");
    } finally {
      server.kill("SIGTERM");
      await ended;
    }
  });
});
