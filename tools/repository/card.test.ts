import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { expect, test } from "vitest";
import { root, sourceFiles } from "./source-files.js";

// What the project is made of, which nothing replaces: packages, tools and the names at the top.
const read = (path: string) => readFileSync(join(root, path), "utf8");
const manifest = (folder: string) =>
  JSON.parse(read(join(folder, "package.json"))) as {
    readonly name: string;
    readonly scripts?: Readonly<Record<string, string>>;
    readonly dependencies?: Readonly<Record<string, string>>;
    readonly devDependencies?: Readonly<Record<string, string>>;
  };
const packages = readdirSync(join(root, "packages")).filter((name) =>
  existsSync(join(root, "packages", name, "package.json")),
);
const built = [...packages.map((name) => `packages/${name}`), "apps/demo"];

test.each(["topology", "plan", "nixl", "pull", "push", "neuron"])("@kv/%s is a package", (name) => {
  expect(manifest(`packages/${name}`).name).toBe(`@kv/${name}`);
});

test("apps/demo is the reference app, and npm run demo starts it", () => {
  expect(manifest("apps/demo").name).toBe("@kv/demo");
  expect(manifest(".").scripts?.["demo"]).toBe("node tools/setup/demo.mjs");
  expect(read("tools/setup/demo.mjs")).toContain("apps/demo/dist/main.js");
});

test("turbo builds, checks and tests", () => {
  expect(manifest(".").devDependencies).toHaveProperty("turbo");
  const { tasks } = JSON.parse(read("turbo.json")) as { tasks: Readonly<Record<string, unknown>> };
  const wanted = [
    "build",
    "compile",
    "test",
    "//#declarations",
    "//#lint",
    "//#lint:imports",
    "//#typecheck",
  ];
  expect(Object.keys(tasks)).toEqual(expect.arrayContaining(wanted));
  expect(manifest(".").scripts?.["build"]).toMatch(/^turbo run build/);
  // npm run demo and npm test run its tasks.
  expect(read("tools/setup/setup.mjs")).toMatch(/turbo\("build"/);
  expect(read("tools/tests/test.mjs")).toMatch(/turboInTerminal\(/);
});

test.each(built)("tsup builds %s with the shared preset", (folder) => {
  expect(manifest(folder).scripts?.["build"]).toMatch(
    /^tsup --config \.\.\/\.\.\/tools\/bundle\/tsup\.config\.mjs( |$)/,
  );
});

// The suites of @kv/conformance run in the packages that use them.
test.each(built.filter((folder) => folder !== "packages/conformance"))(
  "vitest tests %s",
  (folder) => {
    expect(manifest(folder).scripts?.["test"]).toBe(`vitest run --root ../.. ${folder}/`);
  },
);

test("changesets say what a release changes, and make its versions", () => {
  expect(manifest(".").devDependencies).toHaveProperty("@changesets/cli");
  expect(manifest(".").scripts?.["release:version"]).toBe("changeset version");
  expect(existsSync(join(root, ".changeset/config.json"))).toBe(true);
});

test("node-addon-api is what the addon is written with", () => {
  expect(manifest("native").devDependencies).toHaveProperty("node-addon-api");
  const sources = execFileSync("git", ["grep", "-l", "#include <napi.h>", "--", "native/src"], {
    cwd: root,
    encoding: "utf8",
  });
  expect(sources.trim().split("\n").length).toBeGreaterThan(3);
});

test("zod reads configurations", () => {
  const users = packages.filter(
    (name) => manifest(`packages/${name}`).dependencies?.["zod"] !== undefined,
  );
  const imports = users.filter((name) =>
    sourceFiles(root, ["packages"]).some(
      (path) => path.startsWith(`packages/${name}/src/`) && /from "zod"/.test(read(path)),
    ),
  );
  expect(imports).toEqual(users);
  expect(users).toEqual(expect.arrayContaining(["connector", "fleet", "nixl"]));
});

test("the top shows the product, and one workshop", () => {
  const listed = execFileSync("git", ["ls-files", "-co", "--exclude-standard"], {
    cwd: root,
    encoding: "utf8",
  });
  const top = [...new Set(listed.split("\n").map((path) => path.split("/")[0] ?? ""))].filter(
    (name) => name !== "" && existsSync(join(root, name)),
  );
  const product = [
    "README.md",
    "apps",
    "docs",
    "native",
    "package.json",
    "packages",
    "pnpm-workspace.yaml",
    "turbo.json",
  ];
  expect(top).toEqual(expect.arrayContaining(product));
  const beside = ["deploy", "examples", "tools"];
  const pages = ["CONTRIBUTING.md", "LICENSE", "SECURITY.md"];
  // Programs look for these at the top.
  const configuration = ["biome.json", "pnpm-lock.yaml", "tsconfig.json", "vitest.config.ts"];
  const allowed = [...product, ...beside, ...pages, ...configuration];
  expect(top.filter((name) => !allowed.includes(name) && !name.startsWith(".")).sort()).toEqual([]);
});
