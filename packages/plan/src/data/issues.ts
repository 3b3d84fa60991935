import type { z } from "zod";

/** The first things wrong with a document, each with its place in it. */
export function describeIssues(error: z.ZodError): string {
  const shown = error.issues.slice(0, 3).map((issue) => {
    const place = issue.path.length === 0 ? "the document" : issue.path.join(".");
    return `${place}: ${issue.message}`;
  });
  const more = error.issues.length - shown.length;
  return shown.join("; ") + (more > 0 ? `; and ${more} more` : "");
}
