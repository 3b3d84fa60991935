import { cp, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, expect, test } from "vitest";
import { pnpm, run } from "../release/tree.js";
import { compile, pnpmProject } from "./outside.js";
import { packAll } from "./tarballs.js";

// A third party's published connector in an application outside the repository, installed so that
// @kv/connector cannot resolve the third party's package itself.
const here = (path: string) => fileURLToPath(new URL(path, import.meta.url));
const ACME = "acme-kv-connector";

const work = scratchFolder();
let app = "";

beforeAll(async () => {
  const tarballs = new Map(await packAll(join(work, "tarballs")));

  const acme = join(work, "acme", ACME);
  await pnpmProject({
    folder: acme,
    tarballs,
    dependencies: { "@kv/connector": "", "@kv/interface": "", "@kv/pull": "" },
    manifest: {
      name: ACME,
      version: "1.0.0",
      private: false,
      exports: { ".": { types: "./index.d.ts", default: "./index.js" } },
      files: ["index.js", "index.d.ts"],
    },
  });
  await cp(here("acme-kv-connector/index.ts"), join(acme, "index.ts"));
  expect(compile(acme, ["index.ts"], { emit: true })).toEqual([]);
  await pnpm(["pack", "--pack-destination", join(work, "tarballs")], acme);
  tarballs.set(ACME, join(work, "tarballs", `${ACME}-1.0.0.tgz`));

  app = join(work, "user/app");
  await pnpmProject({
    folder: app,
    tarballs,
    dependencies: {
      "@kv/connector": "",
      "@kv/interface": "",
      "@kv/transport-memory": "",
      [ACME]: "",
    },
  });
  await cp(here("acme-app/main.ts"), join(app, "main.ts"));
  expect(compile(app, ["main.ts"], { emit: true })).toEqual([]);
}, 300_000);

test.each(["by-name", "by-module-path"])(
  "a connector registered out of tree, %s, moves a prompt's KV from P to D",
  async (how) => {
    const stdout = await run(process.execPath, ["main.js", how], { cwd: app });
    expect(JSON.parse(stdout)).toEqual({
      connector: ["AcmeConnector", "AcmeConnector"],
      keptBlocks: true,
      tokens: 48,
      differing: 0,
      first: [
        [1, 101],
        [2, 102],
        [3, 103],
      ],
      received: 1,
      transfers: 1,
      bytes: String(3 * 2 * 4096),
    });
  },
  60_000,
);

test("the application resolves only the packages that it lists", async () => {
  const names = await readdir(join(app, "node_modules/@kv"));
  expect(names.sort()).toEqual(["connector", "interface", "transport-memory"]);
  // The folder into which pnpm would hoist.
  expect(await readdir(join(app, "../node_modules/.pnpm"))).not.toContain("node_modules");
});

test("the connector's types are published", async () => {
  await writeFile(
    join(app, "use.mts"),
    [
      'import type { ConnectorModule } from "@kv/interface";',
      'import { AcmeConnector } from "acme-kv-connector";',
      "export const known: ConnectorModule = AcmeConnector;",
    ].join("\n"),
  );
  expect(compile(app, ["use.mts"])).toEqual([]);
  await writeFile(
    join(app, "misuse.mts"),
    'import { AcmeConnector } from "acme-kv-connector";\nAcmeConnector.nothing;',
  );
  expect(compile(app, ["misuse.mts"])).toHaveLength(1);
});
