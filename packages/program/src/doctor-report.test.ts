import { expect, test } from "vitest";
import { checksText, reportOfChecks, warningsText } from "./doctor-report.js";

const words = "some words ".repeat(30).trim();
const check = (status: "ok" | "warn", found: string) => ({
  area: "plan",
  title: "a title",
  status,
  found,
  fix: words,
});
const SUMMARY = { ok: words, warn: words, fail: words };

test("first-contact.md 9: a report is as wide as the terminal, says the same, and is not cut elsewhere", () => {
  const report = reportOfChecks([check("ok", words), check("warn", `${words}\n${words}`)]);
  const text = checksText(report, SUMMARY, 80);
  const lengths = text.split("\n").map(({ length }) => length);
  expect(Math.max(...lengths)).toBeLessThanOrEqual(80);
  const wide = checksText(report, SUMMARY);
  expect(text.split(/\s+/)).toEqual(wide.split(/\s+/));
  expect(wide).toContain(`fix: ${words}\n`);
});

test("first-contact.md 9: one check is a warning, two are warnings", () => {
  const warn = check("warn", "x");
  expect(warningsText(reportOfChecks([warn]))).toBe("1 of 1 checks is a warning");
  expect(warningsText(reportOfChecks([warn, warn]))).toBe("2 of 2 checks are warnings");
});
