"""The style of the page: light and dark, from a telephone to a desktop."""

from __future__ import annotations

from typing import Final

#: Colours of series that colour-blind people can tell apart (Okabe and Ito, lighter where the page is dark); heat maps
#: use one hue whose lightness alone says how much.
STYLE: Final = """
:root{--bg:#f4f6f9;--card:#fff;--ink:#16202b;--muted:#5a6675;--line:#e3e8ee;--soft:#eef2f6;--accent:#0b63a5;
--c1:#0072b2;--c2:#e69f00;--c3:#009e73;--c4:#cc79a7;--c5:#d55e00;--c6:#56b4e9;--c7:#98a2ad;
--b0:#edf2f7;--b1:#d6e6f3;--b2:#b8d5ea;--b3:#92c0de;--b4:#67a7d0;--b5:#418bbf;--b6:#226eab;--b7:#0f5191;--b8:#08336b;
--warn:#fff4e2;--warnline:#e69f00;--calm:#e5f5ef;--calmline:#009e73;--edge:#16202b22;
--shadow:0 1px 2px #16202b14,0 2px 10px #16202b0d}
@media (prefers-color-scheme:dark){:root{--bg:#0e1319;--card:#161d26;--ink:#e7ecf2;--muted:#9ca9b7;--line:#28323e;
--soft:#1d2631;--accent:#79bdf5;--c1:#4ba3e3;--c2:#f0b53a;--c3:#2fc296;--c4:#e29bc2;--c5:#ff8748;--c6:#a4dbf8;--c7:#7f8b98;
--b0:#1b2530;--b1:#153349;--b2:#134260;--b3:#16557b;--b4:#1f6b98;--b5:#3385b5;--b6:#57a3cf;--b7:#8cc4e4;--b8:#d2ebfa;
--warn:#2c2413;--warnline:#f0b53a;--calm:#11291f;--calmline:#2fc296;--edge:#0009;--shadow:0 0 0 1px #28323e}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%;text-size-adjust:100%}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.5;overflow-wrap:anywhere;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","DejaVu Sans",sans-serif}
a{color:var(--accent)}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.88em;white-space:nowrap}
.skip{position:absolute;left:-99em}.skip:focus{left:1em;top:1em;z-index:9;background:var(--card);padding:.5em 1em}
header{max-width:1240px;margin:0 auto;padding:22px 16px 10px}
header p{margin:0;color:var(--muted)}
header .mark{display:inline-block;font-weight:700;font-size:.8rem;letter-spacing:.08em;color:var(--card);background:var(--accent);
border-radius:6px;padding:.1em .6em}
h1{margin:.15em 0 0;font-size:1.75rem;letter-spacing:-.02em;line-height:1.2}
nav{position:sticky;top:0;z-index:5;background:var(--bg);border-bottom:1px solid var(--line)}
nav ul{display:flex;gap:6px;overflow-x:auto;list-style:none;margin:0;padding:8px 16px;scrollbar-width:none}
nav a{display:block;white-space:nowrap;text-decoration:none;font-size:.85rem;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:99px;padding:.3em .85em}
nav a:hover{border-color:var(--accent);color:var(--accent)}
main{max-width:1240px;margin:0 auto;padding:14px 12px}
section{background:var(--card);border-radius:14px;box-shadow:var(--shadow);padding:18px 16px;margin:0 0 14px;
scroll-margin-top:56px}
h2{margin:0;font-size:1.2rem;letter-spacing:-.01em}
h3{margin:0;font-size:.95rem}
.reading{margin:.35em 0 0;max-width:75ch;color:var(--ink)}
.reading em{font-style:normal;font-weight:600}
.empty,.run{color:var(--muted);margin:.8em 0 0;font-size:.9rem}
.empty{border:1px dashed var(--line);border-radius:10px;padding:1.2em;text-align:center}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(134px,1fr));gap:8px;margin:14px 0 0}
.tiles div{background:var(--soft);border-radius:10px;padding:9px 12px}
.tiles dt{font-size:.78rem;color:var(--muted)}
.tiles dd{margin:0;font-size:1.35rem;font-weight:650;letter-spacing:-.01em;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles small{display:block;font-size:.75rem;font-weight:400;letter-spacing:0;color:var(--muted)}
.notices,.calm{margin:14px 0 0;border-left:4px solid var(--warnline);background:var(--warn);
border-radius:4px 10px 10px 4px;padding:10px 14px}
.calm{border-color:var(--calmline);background:var(--calm)}
.notices ul{margin:.3em 0 0;padding-left:1.1em}
.notices li{margin:.15em 0}.notices a{font-size:.85em;white-space:nowrap}
figure{margin:18px 0 0;min-width:0}
figcaption{font-size:.85rem;color:var(--muted);margin:0 0 6px}
figcaption b{color:var(--ink);font-weight:600}
.over{margin:18px 0 0;font-size:.85rem;font-weight:600}
.side figure{display:flex;flex-direction:column}.side .chart{margin-top:auto}
.side{display:grid;gap:0 28px;grid-template-columns:minmax(0,1fr)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:0 0 8px;padding:0;font-size:.8rem;color:var(--muted)}
.legend li{display:flex;align-items:center;gap:6px}
.legend .box,.legend .area{width:11px;height:11px;border-radius:3px;flex:none}
.legend .line{width:22px;height:0;border-top-width:2.5px;border-top-style:solid;flex:none;background:none}
.legend .d1{border-top-style:dashed}.legend .d2{border-top-style:dotted}
.legend .area{opacity:.55}
.chart{display:grid;grid-template-columns:auto minmax(0,1fr);column-gap:8px;font-size:.72rem;color:var(--muted);
font-variant-numeric:tabular-nums}
.ys{position:relative;width:4.2em;height:190px}
.ys span{position:absolute;right:0;transform:translateY(50%);white-space:nowrap}
.area{min-width:0}
.chart .area svg{display:block;width:100%;height:190px;overflow:visible}
.xs{grid-column:2;position:relative;height:1.9em;container-type:inline-size}
.xs span{position:absolute;top:.35em;transform:translateX(-50%);white-space:nowrap}
.xs .minor{display:none}
@container (min-width:620px){.xs .minor{display:inline}}
svg path{vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.hint{fill:transparent}.hint:hover{fill:var(--ink);fill-opacity:.08}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
path.d1{stroke-dasharray:6 4}path.d2{stroke-dasharray:1.5 4}
.band{stroke:none;opacity:.22}
.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}
.band.s5{fill:var(--c5)}
path.c1{fill:var(--c1)}path.c2{fill:var(--c2)}path.c3{fill:var(--c3)}path.c4{fill:var(--c4)}path.c5{fill:var(--c5)}path.c6{fill:var(--c6)}path.c7{fill:var(--c7)}
:is(i,span).c1{background:var(--c1);border-color:var(--c1)}:is(i,span).c2{background:var(--c2);border-color:var(--c2)}
:is(i,span).c3{background:var(--c3);border-color:var(--c3)}:is(i,span).c4{background:var(--c4);border-color:var(--c4)}
:is(i,span).c5{background:var(--c5);border-color:var(--c5)}:is(i,span).c6{background:var(--c6);border-color:var(--c6)}
:is(i,span).c7{background:var(--c7);border-color:var(--c7)}
.heatrow{display:grid;grid-template-columns:4.2rem minmax(0,1fr);gap:8px;align-items:center;margin-bottom:2px}
.heatrow svg{display:block;width:100%;height:16px;border-radius:2px;
background:repeating-linear-gradient(45deg,transparent 0 4px,var(--line) 4px 5px)}
.heat .who,.bars .who{font-size:.78rem;color:var(--muted);overflow:hidden;text-overflow:ellipsis}
.heat .chart{grid-template-columns:4.2rem minmax(0,1fr)}
.heat .who{white-space:nowrap}.heat .area{display:none}
.h0{fill:var(--b0)}.h1{fill:var(--b1)}.h2{fill:var(--b2)}.h3{fill:var(--b3)}.h4{fill:var(--b4)}.h5{fill:var(--b5)}.h6{fill:var(--b6)}.h7{fill:var(--b7)}.h8{fill:var(--b8)}
.heatrow rect:hover{stroke:var(--ink);stroke-width:2;vector-effect:non-scaling-stroke}
.b0{background:var(--b0)}.b1{background:var(--b1)}.b2{background:var(--b2)}.b3{background:var(--b3)}.b4{background:var(--b4)}.b5{background:var(--b5)}
.b6{background:var(--b6)}.b7{background:var(--b7)}.b8{background:var(--b8)}
.bx{background:repeating-linear-gradient(45deg,transparent 0 3px,var(--muted) 3px 4px);border:1px solid var(--line)}
.scale{display:flex;align-items:center;gap:8px;font-size:.75rem;color:var(--muted);margin:2px 0 0}
.ramp{display:flex;flex:0 1 180px}.ramp span{flex:1;height:10px}.scale .end{white-space:nowrap}
.none{display:flex;align-items:center;gap:6px;margin-left:10px}.none .bx{width:14px;height:10px}
.bars{display:grid;gap:4px}
.barrow{display:grid;align-items:center}
.bars{grid-template-columns:fit-content(40%) minmax(64px,1fr) auto;column-gap:10px}
.barrow{grid-column:1/-1;grid-template-columns:subgrid}
.bar{display:flex;height:13px;background:var(--soft);border-radius:4px;overflow:hidden}
.bar i{display:block;height:100%}
.bar i+i{border-left:1px solid var(--card)}
.bars .end{font-size:.8rem;font-variant-numeric:tabular-nums;text-align:right;white-space:nowrap}
.flag{color:var(--c5);font-weight:600}
.scroll{overflow-x:auto;margin:14px 0 0;border:1px solid var(--line);border-radius:10px;max-width:100%;
background:linear-gradient(90deg,transparent,var(--card) 60%) 100% 0/36px 100% no-repeat local,
linear-gradient(270deg,var(--edge),transparent) 100% 0/14px 100% no-repeat scroll}
.scroll:focus-visible,a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
table{border-collapse:collapse;font-size:.82rem;min-width:100%}
caption{text-align:left;padding:8px 12px 4px;font-size:.8rem;color:var(--muted);white-space:nowrap}
th,td{padding:5px 9px;text-align:left;white-space:nowrap;border-top:1px solid var(--line);font-weight:400}
thead th{color:var(--muted);font-size:.76rem;vertical-align:bottom;border-top:0}
th[scope=row]{position:sticky;left:0;background:var(--card);z-index:1}
.n{text-align:right;font-variant-numeric:tabular-nums}
tbody tr:hover>*{background:var(--soft)}
.matrix td{text-align:center;font-variant-numeric:tabular-nums;border:1px solid var(--card);min-width:3.2em}
.matrix th,.matrix td{padding:5px 6px}
.matrix thead th{text-align:center}
.matrix tbody th{padding-left:12px}
.matrix thead td{border:0}
.matrix .b6,.matrix .b7,.matrix .b8{color:#fff}
.matrix tbody tr:hover>th{background:var(--card)}
@media (max-width:699px){th[scope=row]{white-space:normal;overflow-wrap:break-word}}
details{margin:12px 0 0}
summary{cursor:pointer;font-size:.88rem;color:var(--accent);padding:4px 0}summary span{color:var(--muted)}
details caption{display:none}
.meter{display:inline-block;width:44px;height:7px;border-radius:4px;background:var(--soft);overflow:hidden;margin-right:7px;vertical-align:middle}
.meter i{display:block;height:100%;background:var(--c1)}
.spark svg{display:block;width:96px;height:20px}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:12px 18px;margin:8px 0 0}
.multiple p{margin:0 0 3px;font-size:.78rem;color:var(--muted)}.multiple code{color:var(--ink)}
.multiple svg{display:block;width:100%;height:52px;border-bottom:1px solid var(--line)}
footer{max-width:1240px;margin:0 auto;padding:0 16px 28px;color:var(--muted);font-size:.8rem}
@media (prefers-color-scheme:dark){.matrix .b5,.matrix .b6,.matrix .b7,.matrix .b8{color:#0e1319}}
@media (min-width:700px){th,td{padding:5px 12px}
header{padding:30px 24px 12px}main{padding:18px}section{padding:24px 26px;margin-bottom:18px}
nav ul{padding:9px 24px}.ys,.chart .area svg{height:230px}.tiles{grid-template-columns:repeat(5,1fr)}
.tiles dd{font-size:1.5rem}.multiples{grid-template-columns:repeat(4,minmax(0,1fr))}}
@media (min-width:980px){.side{grid-template-columns:repeat(auto-fit,minmax(340px,1fr))}
nav ul{max-width:1240px;margin:0 auto;flex-wrap:wrap;padding:9px 18px}}
@media print{nav,.skip{display:none}section{box-shadow:none;break-inside:avoid}}
"""
