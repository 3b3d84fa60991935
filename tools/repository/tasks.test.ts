import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { expect, test } from "vitest";
import { program, turboEnv } from "../setup/setup.mjs";
import { root, sourceFiles } from "./source-files.js";

// A result of turbo's cache is right where every file that decides it is among the inputs of its
// task, or of a task that it depends on.
interface Task {
  readonly taskId: string;
  readonly task: string;
  readonly directory: string;
  readonly command: string;
  readonly inputs: Readonly<Record<string, string>>;
  readonly dependencies: readonly string[];
}

const { tasks } = JSON.parse(
  execFileSync(program("turbo"), ["run", "test", "--dry=json"], {
    cwd: root,
    env: turboEnv,
    encoding: "utf8",
    maxBuffer: 2 ** 27,
  }),
) as { tasks: readonly Task[] };
const byId = new Map(tasks.map((task) => [task.taskId, task]));

/** The files, from the root of the repository, that decide the result of a task. */
function inputsOf(task: Task): Set<string> {
  const seen = new Set([task]);
  for (const each of seen)
    for (const id of each.dependencies) {
      const dependency = byId.get(id);
      if (dependency !== undefined) seen.add(dependency);
    }
  return new Set(
    [...seen].flatMap(({ directory, inputs }) =>
      Object.keys(inputs).map((path) => relative(root, resolve(root, directory, path))),
    ),
  );
}

const IMPORT = /(?:from|import\(|new URL\()\s*"(\.\.?\/[^"]*|@kv\/[a-z-]+)[^"]*"/g;
/** A file beside, in any call. */
const BESIDE = /"((?:\.\.\/)+[\w./-]+\.\w+)"/g;
const PATH = /"((?:apps|deploy|docs|examples|native|packages|tools)\/[^"*\s]+)"/g;

/** What the tests in a folder import or name of other folders. */
function namedIn(folder: string): string[] {
  const tests = readdirSync(join(root, folder), { recursive: true, encoding: "utf8" })
    .filter((path) => path.endsWith(".ts") && !/node_modules|\bdist\b/.test(path))
    .map((path) => `${folder}/${path}`);
  const found = tests.flatMap((path) => {
    const text = readFileSync(join(root, path), "utf8");
    const imported = Array.from(text.matchAll(IMPORT), ([, name = ""]) => {
      if (name === "@kv/testing") return "tools/testing/src";
      if (name.startsWith("@kv/")) return `packages/${name.slice(4)}/src`;
      return relative(root, resolve(root, dirname(path), name)).replace(/\.js$/, ".ts");
    });
    const beside = Array.from(text.matchAll(BESIDE), ([, name = ""]) =>
      relative(root, resolve(root, dirname(path), name)),
    );
    const literals = Array.from(text.matchAll(PATH), ([, name = ""]) => name);
    return [...imported, ...beside, ...literals];
  });
  const outside = found.filter(
    (path) =>
      !`${path}/`.startsWith(`${folder}/`) && !/(^|\/)(dist|build|node_modules)(\/|$)/.test(path),
  );
  return [...new Set(outside)].filter((path) => path !== "" && existsSync(join(root, path)));
}

const suites = tasks.filter(
  ({ task, directory, command }) =>
    task === "test" && directory !== "tools" && command !== "<NONEXISTENT>",
);

test.each(suites)(
  "what the tests of $directory import or name is among the inputs of their task",
  (task) => {
    const inputs = [...inputsOf(task)];
    const named = namedIn(task.directory);
    expect(
      named.filter(
        (path) => !inputs.some((input) => input === path || input.startsWith(`${path}/`)),
      ),
    ).toEqual([]);
  },
);

test("each package with tests has a task", () => {
  expect(suites.length).toBe(21);
});

/** The files that a configuration of vitest names as `setupFiles`. */
function setUpFilesOf(config: string): string[] {
  const text = readFileSync(join(root, config), "utf8");
  const [list = ""] = /setupFiles: \[[^\]]*/.exec(text) ?? [];
  return Array.from(list.matchAll(/"([^"]+\.ts)"/g), ([, file = ""]) =>
    relative(root, resolve(root, dirname(config), file)),
  );
}

test("what tests share registers no hook at its top: a worker loads it once, for the first file that imports it", () => {
  const sources = sourceFiles(root, ["packages", "apps", "tools"]);
  // vitest runs a set-up file anew for each file of tests.
  const configs = sources.filter((path) => path.endsWith("/vitest.config.ts"));
  const setUps = configs.flatMap(setUpFilesOf);
  expect(setUps.length).toBeGreaterThan(1);
  const shared = sources.filter((path) => !path.endsWith(".live.ts") && !setUps.includes(path));
  expect(shared.length).toBeGreaterThan(900);
  const hook = /^(after|before)(Each|All)\(/m;
  expect(shared.filter((path) => hook.test(readFileSync(join(root, path), "utf8")))).toEqual([]);
});
