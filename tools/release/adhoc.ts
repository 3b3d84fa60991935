import { cpSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { HOW_TOS, writeFiles } from "../docs/how-to-pages.js";
import { publishedPackages, root } from "./packages.js";
import { startRegistry } from "./registry.js";
import { copyTree, run } from "./tree.js";
import { applyChangesets, makeLinksAbsolute, pack, versionsOf } from "./versions.js";
const work = mkdtempSync(join(tmpdir(), "kv-adhoc-"));
const tree = join(work, "tree");
const t0 = Date.now(); const say = (x: string) => console.log(((Date.now() - t0) / 1000).toFixed(0), x);
try {
  await copyTree(tree); await applyChangesets(tree); makeLinksAbsolute(tree);
  const first = join(work, "first"); mkdirSync(first);
  const names = [...publishedPackages(tree)].filter(([, { folder }]) => folder.startsWith("packages/")).map(([n]) => n);
  const tar = await pack(tree, names, first);
  const v = versionsOf(tree);
  writeFileSync(join(first, "order.json"), JSON.stringify(names.map((name) => ({ name, file: basename(tar.get(name) ?? ""), version: v.get(name) }))));
  say("packed");
  await using registry = await startRegistry(join(work, "registry"));
  await run(process.execPath, [join(root, "scripts/release-publish.mjs"), first, `--userconfig=${registry.npmrc}`], { cwd: work });
  say("published");
  for (const { page, module, demo } of HOW_TOS) {
    const folder = join(work, "how-to", page);
    writeFiles(page, folder); cpSync(registry.npmrc, join(folder, ".npmrc"));
    try {
      for (const c of ["install --no-audit --no-fund", "run build", "test"]) { await run("npm", c.split(" "), { cwd: folder }); say(`${page}: npm ${c}`); }
      const shared = join(folder, "shared"); mkdirSync(shared);
      const own = demo(join(folder, `dist/${module}.js`), shared);
      const transport = own.includes("--transport-module") ? [] : ["--transport", "memory"];
      const out = await run(process.execPath, [join(root, "apps/demo/dist/main.js"), ...transport, ...own, "--json"], { cwd: folder });
      const j = JSON.parse(out); say(`${page}: demo ${JSON.stringify(j).slice(0, 300)}`);
    } catch (e) { say(`FAIL ${page}: ${(e as Error).message.slice(0, 3000)}`); }
  }
} finally { rmSync(work, { recursive: true, force: true }); }
