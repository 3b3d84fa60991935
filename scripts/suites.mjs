// Which suites npm test leaves out. CI and `npm run test:long -- --only whole` run all of them, and each suite in its long form (`isLongRun`).
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, lstatSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));

/** All suites run, in their long form. */
export const isWhole = process.env.KV_LONG === "1" || process.env.CI === "true";

/** The workspace packages that each package, and the demo, needs. */
const needs = new Map(
  ["packages", "apps"].flatMap((place) =>
    readdirSync(join(root, place)).map((name) => {
      const { dependencies, devDependencies } = JSON.parse(
        readFileSync(join(root, place, name, "package.json"), "utf8"),
      );
      const all = Object.keys({ ...dependencies, ...devDependencies });
      return [name, all.filter((other) => other.startsWith("@kv/")).map((other) => other.slice(4))];
    }),
  ),
);

/** What decides the result of a package's tests: the package, those that it needs, and what builds and runs all of them. */
function inputsOf(name) {
  const packages = new Set([name]);
  for (const one of packages) for (const other of needs.get(one) ?? []) packages.add(other);
  return [
    new RegExp(`^packages/(${[...packages, "testing"].join("|")})/(?!.*\\.md$)`),
    /^(package\.json|pnpm-lock\.yaml|tsconfig[^/]*\.json|vitest\.config\.ts|scripts\/(build|setup|suites)\.mjs)$/,
  ];
}

const RELEASE = [
  /^(package\.json|pnpm-lock\.yaml|pnpm-workspace\.yaml|tsconfig[^/]*\.json|README\.md)$/,
  /^(\.changeset|\.github|deploy|docs|native|scripts)\//,
  /^tools\/(pack|release|site|deploy)\//,
  /^(packages|apps)\/[^/]+\/[^/]+$/,
  // What a package exports, and its programs.
  /^(packages|apps)\/[^/]+\/src\/(.*\/)?(index|cli|main)\.ts$/,
  /^packages\/nixl\/src\/(addon|install|library)\//,
  /^packages\/((epp|proxy)\/src\/config|kv-plan\/page)\//,
  /^packages\/kv-plan\/test\/chromium\./,
];

/** Suites of whole programs and processes. npm test runs them when one of `inputs` has changed since they passed, or since the commit that is checked out. */
export const BY_INPUTS = [
  {
    name: "release",
    suites: [
      "tools/pack",
      "tools/release",
      "tools/site/site.test.ts",
      "tools/deploy",
      "packages/nixl/test/cli/install.test.ts",
    ],
    inputs: RELEASE,
  },
  {
    name: "programs and the examples of READMEs",
    suites: [
      "tools/docs/readme.test.ts",
      "tools/repository/programs.test.ts",
      "tools/repository/terminal.test.ts",
    ],
    inputs: [
      ...RELEASE,
      /^packages\/(interface|program)\/src\//,
      /^packages\/nixl\/test\/support\//,
      /^tools\/(docs|repository)\//,
    ],
  },
  {
    name: "kv-epp behind Envoy",
    suites: ["tools/envoy"],
    inputs: [...inputsOf("epp"), ...inputsOf("proxy"), /^(apps\/demo|deploy|tools\/envoy)\//],
  },
  {
    name: "clients of npm and Python",
    suites: ["tools/clients"],
    inputs: [
      ...inputsOf("epp"),
      ...inputsOf("proxy"),
      /^(apps\/demo|packages\/testing|tools\/(clients|envoy|vllm))\//,
    ],
  },
  {
    name: "kv-plan's page",
    suites: ["packages/kv-plan/page", "packages/kv-plan/test/page-in-chromium.test.ts"],
    inputs: inputsOf("kv-plan"),
  },
  {
    name: "processes and programs that use @kv/nixl",
    suites: ["packages/nixl/test"],
    inputs: [...inputsOf("nixl"), /^native\//],
  },
  {
    name: "the demo",
    suites: ["apps/demo/test"],
    inputs: [
      ...inputsOf("demo"),
      ...inputsOf("peer"),
      /^(native|apps\/demo|scripts|tools\/docs)\//,
      /^docs\/(metrics|operate\/verify)\.md$/,
    ],
  },
  {
    name: "kv-peer",
    suites: ["packages/peer/test"],
    inputs: [...inputsOf("peer"), /^(native|apps\/demo\/src)\//],
  },
  { name: "@kv/neuron", suites: ["packages/neuron/test"], inputs: [...inputsOf("neuron"), /^native\//] },
  ...["epp", "kv-plan", "program", "proxy"].map((name) => ({
    name: `@kv/${name}`,
    suites: [`packages/${name}/test`],
    inputs: inputsOf(name),
  })),
];

/** Checks that `npm test` leaves out by the same rule. */
export const CHECKS = [
  {
    name: "container files, manifests and workflows (lint:deploy)",
    inputs: [/^(\.github|deploy|packages\/proxy\/deploy)\//, /^(pnpm-lock\.yaml|scripts\/[^/]+\.mjs)$/],
  },
];

/** Suites that only the whole run has, and why. */
export const LONG = [
  ["tools/docs/commands.test.ts", "starts each command of the guides; the programs have suites of their own"],
  [
    "tools/docs/how-to.test.ts",
    "runs each example of the how-to pages; the READMEs' examples run in npm test",
  ],
  [
    "tools/docs/vllm-documents.test.ts",
    "starts each command of a page; npm test checks the tests that the page names",
  ],
  [
    "tools/repository/doc-comments.test.ts",
    "30 s of the type checker; `npm run lint:docs` is the same check",
  ],
  ["tools/pack/bundlers.test.ts", "installs bundlers, and builds with each of them"],
  ["tools/repository/listening.test.ts", "starts every program to see on which addresses it listens"],
  ["tools/faults", "fault runs over the addon; npm test has those over the memory transport"],
  ["tools/long", "50 processes that exit in the middle of something"],
  ["packages/*/test/faults-bite.test.ts", "whether the fault runs notice planted faults"],
  ["packages/neuron/test/faults.test.ts", "fault runs with staging; npm test has those without"],
  [
    "packages/nixl/test/memory/objects-https.test.ts",
    "waits for NIXL, which tries a wrong certificate for 25 s",
  ],
  ["packages/nixl/test/metadata/etcd-hosts.test.ts", "waits for a lease of etcd to end"],
  ["packages/nixl/test/process/row-takeover.test.ts", "waits for threads that have been left"],
  ["packages/fleet/test/kubernetes-memory.test.ts", "measures memory over many events"],
  ["packages/proxy/test/flow/memory.test.ts", "measures memory over many requests"],
  ["bench", "the benchmarks' own tests"],
  [
    "apps/demo/test/failures-nixl.test.ts",
    "ends the demo's instances by force over NIXL; the fault runs and packages/proxy/test/flow/failure.test.ts have such ends",
  ],
  [
    "apps/demo/test/neuron-nixl.test.ts",
    "staging over NIXL; neuron-memory.test.ts has it over the memory transport",
  ],
  [
    "apps/demo/test/verify-nixl.test.ts",
    "runs kv-peer verify over NIXL; verify-memory.test.ts and packages/peer/test/verify.test.ts have its checks",
  ],
  ["apps/demo/test/monitoring.test.ts", "waits until Prometheus has scraped and no alert has fired"],
];

/** Suites of more than a unit: npm test leaves them out as well when no file has changed since all of it passed. */
export const SYSTEMS = ["apps/demo/test", "tools", "packages/*/test"];

/** The patterns of vitest's `exclude` for suites that are given by folder or by file. */
export const patternsOf = (suites) => suites.map((path) => (path.endsWith(".ts") ? path : `${path}/**`));

const stamps = join(root, "node_modules/.cache/kv-tests.json");

/** A digest of the files that git does not ignore and that `among` takes; undefined without git. */
function digestOf(among) {
  const list = spawnSync("git", ["ls-files", "-coz", "--exclude-standard"], { cwd: root, encoding: "utf8" });
  if (list.status !== 0) return undefined;
  const hash = createHash("sha256").update(process.version);
  for (const path of list.stdout.split("\0").filter(among))
    if (lstatSync(join(root, path), { throwIfNoEntry: false })?.isFile())
      hash.update(`\0${path}\0`).update(readFileSync(join(root, path)));
  return hash.digest("hex");
}

/** The files that have changed since the commit that is checked out; undefined without git. */
function changedFiles() {
  const list = spawnSync("git", ["status", "--porcelain", "--no-renames", "-z"], {
    cwd: root,
    encoding: "utf8",
  });
  return list.status === 0 ? list.stdout.split("\0").map((entry) => entry.slice(3)) : undefined;
}

/** What has not changed since it passed. Files are read when it is made, before the tests. */
export class PassedFiles {
  #all = digestOf((path) => path !== "");
  #passed = existsSync(stamps) ? JSON.parse(readFileSync(stamps, "utf8")) : {};
  /** Of the suites of `BY_INPUTS` that have to run. */
  #digests = {};

  constructor() {
    const changed = changedFiles();
    for (const { name, inputs } of [...BY_INPUTS, ...CHECKS]) {
      const isInput = (path) => inputs.some((input) => input.test(path));
      const digest = digestOf(isInput);
      const isUnchanged = changed?.some(isInput) === false || this.#passed[name] === digest;
      if (isWhole || changed === undefined || !isUnchanged) this.#digests[name] = digest;
    }
  }

  /** No file has changed. */
  get all() {
    return !isWhole && this.#all !== undefined && this.#all === this.#passed.all;
  }

  /** No input of the suites or of the check with this name has changed. */
  of(name) {
    return !Object.hasOwn(this.#digests, name);
  }

  /** The check with this name could not run. */
  skipped(name) {
    delete this.#digests[name];
  }

  /** Everything that ran has passed. */
  passed() {
    mkdirSync(dirname(stamps), { recursive: true });
    writeFileSync(stamps, JSON.stringify({ ...this.#passed, ...this.#digests, all: this.#all }));
  }
}
