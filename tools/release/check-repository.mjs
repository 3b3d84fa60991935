// node tools/release/check-repository.mjs URL: fails unless the packages name the repository that
// they are published from, which npm's provenance requires.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../setup/setup.mjs";

const expected = process.argv[2] ?? "";
const { repository } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
if (repository.url !== `git+${expected}.git`) {
  console.error(
    `check-repository: package.json names ${repository.url}, but this is ${expected}\n` +
      `  set "repository" in package.json to git+${expected}.git, then: npm run release:metadata`,
  );
  process.exit(1);
}
