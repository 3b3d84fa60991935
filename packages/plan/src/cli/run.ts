import { writeFile } from "node:fs/promises";
import { KvError } from "@kv/interface";
import { CommanderError } from "commander";
import { planToDocument } from "../data/plan-document.js";
import { readPair } from "./input/read-pair.js";
import { type CliOptions, command } from "./options.js";
import { renderHtml } from "./render/render-html.js";
import { renderMermaid } from "./render/render-mermaid.js";
import { renderSvg } from "./render/render-svg.js";
import { renderText } from "./render/render-text.js";
import { analysePair, plansOf } from "./report/analyse-pair.js";
import type { PairReport } from "./report/report.js";

/** Where the command writes. */
export interface Output {
  stdout(text: string): void;
  stderr(text: string): void;
}

/** Of the process: the pair has a plan and it is proven; it is refused; the plan is not proven; the command line or an input is wrong. */
export const EXIT_CODES = { planned: 0, wrongInput: 1, refused: 2, notProven: 3 } as const;

/** Runs `kv-plan` with arguments (without node and script) and returns its exit code. */
export async function runKvPlan(args: readonly string[], output: Output): Promise<number> {
  const program = command()
    .exitOverride()
    .configureOutput({ writeOut: (text) => output.stdout(text), writeErr: (text) => output.stderr(text) });
  try {
    program.parse(args, { from: "user" });
  } catch (error) {
    if (error instanceof CommanderError) return error.exitCode;
    throw error;
  }
  try {
    return await work(program.opts<CliOptions>(), output);
  } catch (error) {
    const known = KvError.from(error, "KV_INTERNAL", "unexpected error");
    output.stderr(`kv-plan: ${known.message} [${known.code}]\n`);
    if (known.hint !== undefined) output.stderr(`  ${known.hint}\n`);
    return EXIT_CODES.wrongInput;
  }
}

async function work(options: CliOptions, output: Output): Promise<number> {
  const forms = (["json", "mermaid", "svg", "html", "plans"] as const).filter((form) => options[form]);
  if (forms.length > 1) {
    throw new KvError("KV_CONFIG_INVALID", `--${forms.join(" and --")} are given; one form is printed`);
  }
  const pair = await readPair(options);
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
  const [form] = forms;
  const text =
    form === "plans" && report.outcome === "planned"
      ? plansOf(pair, settings)
          .map((plan) => `${JSON.stringify(planToDocument(plan))}\n`)
          .join("")
      : rendered(report, form === "plans" ? undefined : form);
  if (options.out === undefined) output.stdout(text);
  else await write(options.out, text);
  if (report.outcome === "refused") return EXIT_CODES.refused;
  return report.proof.proven ? EXIT_CODES.planned : EXIT_CODES.notProven;
}

function rendered(report: PairReport, form: "json" | "mermaid" | "svg" | "html" | undefined): string {
  if (form === "json") return `${JSON.stringify(report, null, 2)}\n`;
  if (form === "mermaid") return renderMermaid(report);
  if (form === "svg") return renderSvg(report);
  return form === "html" ? renderHtml(report) : renderText(report);
}

async function write(file: string, text: string): Promise<void> {
  try {
    await writeFile(file, text);
  } catch (error) {
    throw KvError.from(error, "KV_CONFIG_INVALID", `${file} cannot be written`);
  }
}
