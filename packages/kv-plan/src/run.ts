import { readFile, writeFile } from "node:fs/promises";
import tab from "@bomb.sh/tab/commander";
import { KvError } from "@kv/interface";
import type { EngineTransferPlan } from "@kv/plan";
import { commanderOutput, EXIT_CODES, reportFailure } from "@kv/program";
import { planToDocument } from "./data/plan-document.js";
import type { Pair } from "./input/pair.js";
import { readPair } from "./input/read-pair.js";
import { type CliOptions, command } from "./options.js";
import { renderHtml } from "./render/render-html.js";
import { renderSvg } from "./render/render-svg.js";
import { renderText } from "./render/render-text.js";
import { analysePair } from "./report/analyse-pair.js";
import { plansOf } from "./report/plans-of-pair.js";
import type { PairReport } from "./report/report.js";
import type { ReportOptions } from "./report-options.js";
import { runSize } from "./size/run-size.js";

/** Where a command writes. */
export interface Output {
  /** Writes a part of the report. */
  stdout(text: string): void;
  /** Writes a part of an error message. */
  stderr(text: string): void;
}

/** `args` exclude node and the script. Returns one of `EXIT_CODES` of `@kv/program`. */
export async function runKvPlan(args: readonly string[], output: Output): Promise<number> {
  if (args.some((arg) => arg === "--from" || arg.startsWith("--from="))) {
    output.stderr(
      "kv-plan: --from is not a flag of kv-plan: kv-peer plan asks running engines [KV_CONFIG_INVALID]\n",
    );
    output.stderr(
      "  kv-peer plan --from PREFILL:5600 --tp 8 --from DECODE:5600 --tp 4 --kv-heads 8\n",
    );
    return EXIT_CODES.couldNotRun;
  }
  const program = command()
    .addHelpText("after", "\nkv-plan size --help: how many tokens and requests fit into a GPU")
    .exitOverride()
    .configureOutput({
      ...commanderOutput("kv-plan"),
      writeOut: (text) => output.stdout(text),
      writeErr: (text) => output.stderr(text),
    });
  try {
    if (args[0] === "size") return await runSize(args.slice(1), output);
    // A shell's completion is no subcommand, because commander would otherwise require one.
    if (args[0] === "complete") {
      tab(program);
      program.parse(args, { from: "user" });
      return EXIT_CODES.ok;
    }
    program.parse(args, { from: "user" });
    const options = program.opts<CliOptions>();
    formOf(options);
    const input = await readPair(options);
    return "outcome" in input
      ? await printOut(input, options, output)
      : await printReport(input, options, output);
  } catch (error) {
    return reportFailure("kv-plan", error, (text) => output.stderr(text));
  }
}

/**
 * Plans and proves a pair with a sample request, and prints the report. Returns an exit code:
 * `failed` without a plan, or with a fault in the proof.
 * @throws `KV_CONFIG_INVALID` for two forms, or for a file that cannot be written.
 */
export async function printReport(
  pair: Pair,
  options: ReportOptions,
  output: Pick<Output, "stdout">,
): Promise<number> {
  const settings = {
    numTokens: options.tokens,
    computedBlocks: options.computed,
    pool: options.pool,
    bandwidthGBps: options.bandwidth,
    conversions: [
      ...(options.permute ? (["hnd-to-nhd"] as const) : []),
      ...(options.repack ? (["attention-order"] as const) : []),
    ],
    masksUncovered: options.masked,
    form: options.form,
  };
  const report = analysePair(pair, settings);
  return printOut(report, options, output, () => plansOf(pair, settings));
}

/** `plans` are those of a planned pair. */
async function printOut(
  report: PairReport,
  options: ReportOptions,
  output: Pick<Output, "stdout">,
  plans: () => readonly EngineTransferPlan[] = () => [],
): Promise<number> {
  const form = formOf(options);
  const text =
    form === "plans" && report.outcome === "planned"
      ? plans()
          .map((plan) => `${JSON.stringify(planToDocument(plan))}\n`)
          .join("")
      : await rendered(report, form === "plans" ? undefined : form);
  if (options.out === undefined) output.stdout(text);
  else await write(options.out, text);
  return report.outcome === "planned" && report.proof.proven ? EXIT_CODES.ok : EXIT_CODES.failed;
}

/** The script of `--html` pages, written by the build. */
const REPORT_PAGE = new URL("../dist/report-page.js", import.meta.url);

const FORMS = ["json", "svg", "html", "plans"] as const;
type Form = (typeof FORMS)[number];

/**
 * Returns undefined for text.
 * @throws `KV_CONFIG_INVALID` when there are several.
 */
function formOf(options: ReportOptions): Form | undefined {
  const [form, ...more] = FORMS.filter((one) => options[one]);
  if (more.length === 0) return form;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--${[form, ...more].join(" and --")} are given; the report has one form`,
  );
}

async function rendered(
  report: PairReport,
  form: Exclude<Form, "plans"> | undefined,
): Promise<string> {
  if (form === "json") return `${JSON.stringify(report, null, 2)}\n`;
  if (form === "svg") return renderSvg(report);
  if (form === "html") return renderHtml(report, await readFile(REPORT_PAGE, "utf8"));
  return renderText(report);
}

async function write(file: string, text: string): Promise<void> {
  try {
    await writeFile(file, text);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} cannot be written`);
  }
}
