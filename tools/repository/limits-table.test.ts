import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, it } from "vitest";
import { httpLimits } from "../../apps/demo/src/http/limits.js";
import { PICKER_LIMITS } from "../../packages/epp/test/support/picker-limits.js";
import { SUBSCRIPTION_LIMITS } from "../../packages/fleet/src/kv-events/kv-event-batch.js";
import { DEFAULT_TARGET_LIMITS } from "../../packages/nixl/src/bench/target.js";
import { WATCH_METRICS_LIMITS } from "../../packages/peer/src/cli/watch-command.js";
import { PREFILL_LIMITS } from "../../packages/peer/src/headless/prefill-server.js";
import { PROXY_LIMITS } from "../../packages/proxy/test/support/proxy-limits.js";
import { sideChannelLimits } from "../../packages/side-channel/src/listener/limits.js";

const root = join(import.meta.dirname, "../..");

/**
 * `dependent`: the defaults that depend on the process's limit of open files, as the table writes
 * them.
 */
function rowsOf(limits: object, dependent: Record<string, string> = {}): [string, string][] {
  return Object.entries(limits).map(([name, value]) => [name, dependent[name] ?? grouped(value)]);
}

const CONNECTIONS = {
  maxConnections: "a quarter of the open files, 1,024 at most",
  maxConnectionsPerAddress: "half of `maxConnections`",
};

const limitsOf = (listener: string): [string, string][] =>
  [...PROXY_LIMITS, ...PICKER_LIMITS]
    .filter((limit) => limit.listener === listener)
    .map((limit) => [
      limit.name,
      typeof limit.default === "number" ? grouped(limit.default) : limit.default,
    ]);

function grouped(value: number): string {
  return value.toLocaleString("en-US");
}

interface Listener {
  /** Its heading in SECURITY.md. */
  readonly heading: string;
  /** Names and defaults. */
  readonly limits: readonly (readonly [string, string])[];
  /** The files whose tests have the limits' names. */
  readonly files: readonly string[];
}

/** The tries of the limits that engines' HTTP servers share. */
const OF_ENGINES = "tools/testing/src/http/http-limits.ts";
const LISTENERS: readonly Listener[] = [
  {
    heading: "Side channel",
    limits: rowsOf(sideChannelLimits({}), CONNECTIONS),
    files: [
      "packages/side-channel/src/zmq-limits.test.ts",
      "packages/side-channel/src/zmq-side-channel.test.ts",
    ],
  },
  {
    heading: "kv-proxy, clients",
    limits: limitsOf("clients"),
    files: ["packages/proxy/test/http/every-limit.long.test.ts"],
  },
  {
    heading: "kv-proxy, admin port",
    limits: limitsOf("admin"),
    files: ["packages/proxy/test/http/every-limit.long.test.ts"],
  },
  {
    heading: "kv-epp, gateways",
    limits: limitsOf("gateways"),
    files: ["packages/epp/test/limits.long.test.ts"],
  },
  {
    heading: "kv-epp, metrics port",
    limits: limitsOf("metrics"),
    files: ["packages/epp/test/limits.long.test.ts"],
  },
  {
    heading: "Instance of the reference app",
    limits: rowsOf(httpLimits(), {
      ...CONNECTIONS,
      maxRequestsPerAddress: "half of `maxRequests`",
      maxBodiesBytesPerAddress: "half of `maxBodiesBytes`",
    }),
    files: ["apps/demo/src/http/limits.test.ts", OF_ENGINES],
  },
  {
    heading: "kv-peer prefill",
    limits: rowsOf(PREFILL_LIMITS),
    files: ["packages/peer/test/limits.test.ts", OF_ENGINES],
  },
  {
    heading: "kv-peer watch, metrics port",
    limits: rowsOf(WATCH_METRICS_LIMITS),
    files: ["packages/peer/test/limits.test.ts", OF_ENGINES],
  },
  {
    heading: "Subscription to KV events",
    limits: rowsOf(SUBSCRIPTION_LIMITS),
    files: [
      "packages/side-channel/src/client/subscription.test.ts",
      "packages/fleet/src/kv-events/kv-events.test.ts",
    ],
  },
  {
    heading: "kv-nixl bench --listen",
    limits: rowsOf(DEFAULT_TARGET_LIMITS),
    files: ["packages/nixl/src/bench/target.test.ts"],
  },
];

/** The limits under a heading of SECURITY.md: name, default, and what happens at it. */
function limitsUnder(heading: string): { name: string; value: string; effect: string }[] {
  const page = readFileSync(join(root, "SECURITY.md"), "utf8");
  const [, section = ""] = page.split(`\n### ${heading}\n`);
  const [own = ""] = section.split(/\n##/);
  const [, ...items] = own.replaceAll(/\n {2,}/g, " ").split("\n- ");
  return items.flatMap((item) => {
    const [effect = ""] = item.split(": ");
    const limits = item.matchAll(/`([^`]+)` \(((?:[^()]|\([^()]*\))*)\)/g);
    return Array.from(limits, ([, name = "", value = ""]) => ({ name, value, effect }));
  });
}

const sorted = (limits: Iterable<readonly [string, string]>) => [...limits].toSorted();

describe("SECURITY.md has each limit with its default, what happens at it, and a test that reaches it", () => {
  it.each(LISTENERS)("$heading", ({ heading, limits, files }) => {
    const listed = limitsUnder(heading);
    expect(sorted(listed.map(({ name, value }) => [name, value]))).toEqual(sorted(limits));
    for (const { name, effect } of listed) expect(effect.length, name).toBeGreaterThan(2);
    const tests = files.map((file) => readFileSync(join(root, file), "utf8")).join("\n");
    for (const [name] of limits)
      expect(tests, `${heading}: no test of ${name}`).toMatch(testOf(name));
  });
});

it("A3, A11: each endpoint of SECURITY.md says what one client or peer can cause in all, and a test tries it", () => {
  const page = readFileSync(join(root, "SECURITY.md"), "utf8");
  const [, table = ""] = page.split(/\n\| endpoint \|[^\n]*\n[^\n]*\n/);
  const rows = table.slice(0, table.indexOf("\n\n")).split("\n");
  expect(rows.length).toBe(12);
  for (const row of rows) {
    const cell = row.split(/ \| /).at(-1) ?? "";
    if (cell.startsWith("nothing bounds it")) continue;
    // A limit's name, or words of a test's title, come before the file that tries it.
    const tried = [...cell.matchAll(/(.*?)\[tried\]\(([^)]+)\)/g)];
    expect(tried.length, row.slice(0, 60)).toBeGreaterThan(0);
    for (const [, budget = "", file = ""] of tried) {
      const tests = readFileSync(join(root, file), "utf8");
      const names = [...budget.matchAll(/[`"]([^`"]+)[`"]/g)].map(([, name = ""]) => name);
      expect(names.length, budget).toBeGreaterThan(0);
      for (const name of names)
        expect(tests, `${file} has no test of ${name}`).toContain(name.replace(/^limits\./, ""));
    }
  }
});

/** A test's title that has the limit's name, or the limit's entry in a map of what is tried. */
function testOf(name: string): RegExp {
  const escaped = name.replaceAll(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return new RegExp(`test\\("[^"]*\\b${escaped}\\b|^ {2,4}(async )?"?${escaped}"?[(:]`, "m");
}
