// SPDX-License-Identifier: Apache-2.0
// Names for screen readers, and keys for tables that scroll: the theme leaves them out.
"use strict";
function label() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll("nav.md-code__nav").forEach((nav, at) => nav.setAttribute("aria-label", `Code ${at + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((table, at) => {
    if (table.scrollWidth <= table.clientWidth) return;
    table.tabIndex = 0;
    table.setAttribute("role", "region");
    table.setAttribute("aria-label", `Table ${at + 1}`);
  });
}
new MutationObserver(label).observe(document.body, {childList: true, subtree: true});
label();
